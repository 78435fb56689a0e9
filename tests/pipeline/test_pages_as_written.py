"""The commands of README and tutorial, typed in the order of the page, in an empty directory."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from tests.pipeline.test_recipes import ROOT, SMALL

INGOT = [sys.executable, "-c", "from ingot.cli.app import main; main()"]
PROGRAMS = {"ingot": INGOT, "python": [sys.executable]}


def _blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks of a page; a block of commands has no language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def _commands(block: str) -> list[str]:
    """The commands of a block, without the comments behind them."""
    lines = (line.split("  #")[0].strip() for line in block.splitlines())
    return [command for line in lines if line for command in line.split(" && ")]


def _type(command: str, directory: Path, keyboard: str = "") -> str:
    """Run a command of a page; its standard output."""
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=directory, env=environment, input=keyboard, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.mark.slow
def test_the_tutorial_as_written(tmp_path: Path) -> None:
    """Files are saved under the name in their first line. The model answers in the conversation what the page shows,
    and after a quarter of the training it does not.
    """
    blocks = _blocks("docs/tutorial.md")
    (shown,) = (text for _, text in blocks if text.startswith("you> "))
    questions, answers = re.findall(r"^you> (.+)$", shown, re.M), re.findall(r"^it> +(.+)$", shown, re.M)
    keyboard = "".join(f"{question}\n" for question in questions)
    said = {}
    for language, text in blocks:
        if language in ("python", "toml"):
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        for command in _commands(text) if language == "" else []:
            said[command] = _type(command, tmp_path, keyboard)
    chat = "ingot chat runs/talk/chat --temperature 0"
    known = answers[:-1]  # the last question is about something that it was not taught
    assert len(known) == 3
    assert [answer for answer in known if answer in said[chat]] == known
    untaught = _type(chat.replace("talk", "short"), tmp_path, keyboard)
    assert not all(answer in untaught for answer in known)


@pytest.mark.slow
def test_the_readme_as_written(tmp_path: Path) -> None:
    """After a demo that SMALL makes short, in a directory with the example recipes and a folder of text."""
    (tmp_path / "notes").mkdir()
    for number in range(50):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"Day {number}. The sun rose at {number % 24}. " * 20)
    _type("ingot init .", tmp_path)
    _shorten(tmp_path / "stdlib.toml")
    _type("ingot run stdlib.toml", tmp_path)
    typed = 0
    for language, text in _blocks("README.md"):
        if language == "python":
            _type(f"python -c {shlex.quote(text)}", tmp_path)
        for command in _commands(text) if language == "" else []:
            if not command.startswith("make "):
                _type(command, tmp_path, "Hello.\n")
                typed += 1
    assert typed == 8
    assert (tmp_path / "out" / "chat" / "model.safetensors").exists()


def _shorten(recipe: Path) -> None:
    settings = tomllib.loads(recipe.read_text())
    for override in SMALL:
        name, _, value = override.partition("=")
        *tables, last = name.split(".")
        table = settings
        for key in tables:
            table = table.setdefault(key, {})
        table[last] = tomllib.loads(f"value = {value}")["value"]
    recipe.write_text(tomli_w.dumps(settings))
