"""The commands of README and tutorial, typed in the order of the page, in an empty directory."""

import json
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
NO_NETWORK = """
import socket, pathlib
def refuse(*args, **kwargs):
    pathlib.Path(__file__).with_name("called").write_text(repr(args))
    raise OSError("the network is blocked")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.create_connection = refuse
"""


def _blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks of a page; a block of commands has no language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def _commands(block: str) -> list[str]:
    """The commands of a block, without the comments behind them."""
    lines = (line.split("  #")[0].strip() for line in block.splitlines())
    return [command for line in lines if line for command in line.split(" && ")]


def _type(command: str, directory: Path, keyboard: str = "") -> str:
    """Run a command of a page; its standard output."""
    result = _started(command, directory, keyboard)
    assert result.returncode == 0, f"{command}\n{result.stderr[-3000:]}"
    return result.stdout


def _started(
    command: str, directory: Path, keyboard: str = "", modules: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a page; Python looks in the directory `modules` first."""
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [modules, *sys.path])), **environment}
    return subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=directory, env=environment, input=keyboard, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the demo, made short by SMALL, ran in processes whose sockets refuse."""
    path = tmp_path_factory.mktemp("demo")
    (path / "blocked").mkdir()
    (path / "blocked" / "sitecustomize.py").write_text(NO_NETWORK)
    for command in ("ingot init .", "ingot run stdlib.toml"):
        result = _started(command, path, modules=str(path / "blocked"))
        assert result.returncode == 0, result.stderr[-3000:]
        if command == "ingot init .":
            _shorten(path / "stdlib.toml")
    return path


@pytest.mark.slow
def test_the_demo_makes_no_network_call_and_ends_in_a_report(demo: Path) -> None:
    assert not (demo / "blocked" / "called").exists()
    page = (demo / "runs" / "stdlib" / "report.html").read_text()
    assert "gzip -9" in page
    assert not re.search(r"(src|href)=\"https?://", page)
    talk = json.loads((demo / "runs" / "stdlib" / "questions@bpe" / "result.json").read_text())
    assert 0.2 < talk["trained_fraction"] < 0.9
    blocked = {"modules": str(demo / "blocked"), "HOME": str(demo / "home")}  # a home that holds no earlier download
    control = _started("ingot run shakespeare-char.toml", demo, **blocked)
    assert control.returncode == 2  # the one recipe that needs the network says what to do without it
    assert "sources=" in control.stderr
    assert (demo / "blocked" / "called").exists()


@pytest.mark.long
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
def test_the_readme_as_written(demo: Path) -> None:
    """After the demo, in a directory with the example recipes and a folder of text."""
    (demo / "notes").mkdir()
    for number in range(50):
        (demo / "notes" / f"{number}.txt").write_text(f"Day {number}. The sun rose at {number % 24}. " * 20)
    typed = 0
    for language, text in _blocks("README.md"):
        if language == "python":
            _type(f"python -c {shlex.quote(text)}", demo)
        for command in _commands(text) if language == "" else []:
            if not command.startswith("make "):
                _type(command, demo, "Hello.\n")
                typed += 1
    assert typed == 8
    assert (demo / "out" / "chat" / "model.safetensors").exists()


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
