"""Standard streams that are closed, broken or full, and names with control characters on them."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core.errors import printable
from ingot.core.events import Display
from ingot.report.terminal import console

RECIPE = """
[run]
name = "t"
[stage.clean]
kind = "corpus"
sources = ["notes.jsonl"]
quality = "none"
holdout = { fraction = 0.0 }
[stage.bpe]
kind = "tokenizer"
from = "clean"
type = "char"
"""
INGOT = f"{sys.executable} -c 'from ingot.cli.app import main; main()'"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "r.toml").write_text(RECIPE)
    (tmp_path / "notes.jsonl").write_text("".join(f'{{"text": "note {i} of many"}}\n' for i in range(20)))
    return tmp_path


def _shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash that ends with the exit code of the first command of its pipe."""
    line = f'ingot() {{ {INGOT} "$@"; }}; {command}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "ingot run r.toml --only clean >&-",
        "ingot run r.toml --only clean 2>&-",
        "ingot run r.toml --only clean <&- >&- 2>&-",
        "ingot plan r.toml >&- 2>&-",
        "ingot status r.toml --json 2>&-",
        "ingot plan r.toml | true",
        "ingot status r.toml 2>&1 | true",
    ],
)
def test_streams_that_nobody_reads_end_no_command(work: Path, command: str) -> None:
    result = _shell(command, work)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    if "run" in command:
        assert (work / "runs" / "t" / "clean" / "DONE").exists()


def test_a_full_standard_output_is_one_sentence(work: Path) -> None:
    result = _shell("ingot status r.toml --json >/dev/full", work)
    assert result.returncode == 2
    assert (
        result.stderr
        == "error: standard output or a file: the disk is full; free space and run the same command again\n"
    )


def test_an_error_keeps_its_code_where_nobody_reads_it(work: Path) -> None:
    assert _shell("ingot plan none.toml 2>&-", work).returncode == 2
    assert _shell("ingot plan none.toml 2>/dev/full", work).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "| head -c 1"])
def test_generation_without_streams(stage: Path, tmp_path: Path, streams: str) -> None:
    result = _shell(f"ingot generate {stage} --max-new 3 a {streams}", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31mb", r"a\u001b[31mb"),
        ("a\rb\x07", r"a\u000db\u0007"),
        ("\x9b2J\x7f", r"\u009b2J\u007f"),
        ("a\u202egpj.exe", r"a\u202egpj.exe"),
        ("plain ü 字 🙂\t", "plain ü 字 🙂\t"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(name: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(name) == shown
    Display().notify(f"{name} is not read")
    console().print(name, soft_wrap=True)
    console(error=True).print(name, soft_wrap=True)
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not any(ord(c) < 32 and c not in "\n\t" for c in text)
        assert not any(c in text for c in "\x7f\x9b\u202e")


def test_errors_and_json_escape_names(work: Path) -> None:
    (work / "r.toml").write_text(RECIPE.replace("notes.jsonl", r"\u001b[2Jnotes\u009b.jsonl"))
    result = _shell("ingot plan r.toml", work)
    assert result.returncode == 2
    assert r"\u001b[2Jnotes\u009b.jsonl" in result.stderr
    assert not {"\x1b", "\x9b"} & set(result.stdout + result.stderr)
