"""Bad input: one sentence (where, found, expected, what to do), exit code 2, nothing half-written."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import StageDir, checkpoint_steps
from ingot.core.events import read_events
from tests.pipeline.conftest import make_work


def _refused(result: "subprocess.CompletedProcess[str]", *parts: str) -> str:
    """Exit 2, one line (nothing of a traceback), and the parts in it."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if any(p in line for p in parts)]
    assert errors, result.stderr
    for part in parts:
        assert part in errors[-1], result.stderr
    return errors[-1]


def _recipe(path: Path, *changes: tuple[str, str]) -> None:
    text = (path / "tiny.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path / "tiny.toml").write_text(text)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ([("quality = ", "qualty = ")], ["stage.clean.qualty", "unknown setting", "did you mean 'quality'?"]),
        ([("vocab = 300", 'vocab = "many"')], ["stage.bpe.vocab", "found 'many'", "a whole number"]),
        ([("vocab = 300", "vocab = 100")], ["stage.bpe.vocab", "found 100", "at least 272"]),
        ([('kind = "evaluate"', 'kind = "evalute"')], ["stage.card.kind", "unknown kind 'evalute'", "'evaluate'"]),
        (
            [('duration = "60 steps"', 'duration = "a while"')],
            ["stage.base.duration", "found 'a while'", "'5000 steps'"],
        ),
        ([("clean = 1.0", "clean = inf")], ["stage.base.data", "found inf", "finite number"]),
        ([('duration = "60 steps"', 'duration = "1e400 steps"')], ["stage.base.duration", "at most 1e+18"]),
        ([("width = 32", "width = 33")], ["stage.base.model", "width 33", "heads 2"]),
        (
            [('tokenizer = "bpe"', 'tokenizer = "bep"')],
            ["stage.base.tokenizer", "no stage 'bep'", "did you mean 'bpe'?"],
        ),
        ([('init = "base"', 'init = "base"\ntokenizer = "bpe"')], ["stage.chat", "both init = 'base' and a tokenizer"]),
        ([("vocab = 300", 'type = "char"')], ["stage.chat.data", 'format = "chat"', "'bpe' is of type char"]),
        ([("[run]", "[run")], ["tiny.toml", "not valid TOML", "line 2"]),
        ([('sources = ["notes"]', 'sources = ["nots"]')], ["stage.clean", "nots"]),
    ],
    ids=lambda p: p[0] if isinstance(p[0], str) else p[0][1][:30],
)
def test_a_wrong_recipe_is_refused_before_anything_runs(work: Path, ingot, changes, parts) -> None:
    _recipe(work, *changes)
    result = ingot("run", "tiny.toml", cwd=work)
    _refused(result, *parts)
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not list(work.glob("runs/stages/*-*/inputs.json"))


def test_all_errors_of_a_recipe_are_told_at_once(work: Path, ingot) -> None:
    _recipe(work, ("vocab = 300", "vocab = 100"), ("fraction = 0.2", "shar = 0.2"), ("depth = 2", 'depth = "two"'))
    error = ingot("plan", "tiny.toml", cwd=work).stderr
    assert all(
        name in error
        for name in ("stage.bpe.vocab", "stage.clean.holdout.shar", "stage.talk.holdout.shar", "stage.base.model.depth")
    )


def test_no_such_recipe(tmp_path: Path, ingot) -> None:
    _refused(ingot("run", "absent.toml", cwd=tmp_path), "absent.toml", "no such recipe", "ingot init")


def test_an_empty_source(work: Path, ingot) -> None:
    for note in (work / "notes").iterdir():
        note.unlink()
    _refused(ingot("run", "tiny.toml", cwd=work), "stage.clean", "notes")


def test_invalid_utf8_and_malformed_lines_are_quarantined_and_counted(work: Path, ingot) -> None:
    with (work / "talk.jsonl").open("ab") as file:
        file.write(b'{"messages": [broken\n')
        file.write(b'{"messages": "\xff\xfe"}\n')
    assert ingot("run", "tiny.toml", "--only", "talk", cwd=work).returncode == 0
    stage = work / "runs" / "tiny" / "talk"
    assert json.loads((stage / "result.json").read_text())["quarantined_documents"] == 2
    rows = [json.loads(line) for line in (stage / "quarantine.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [81, 82]
    assert all("talk.jsonl" in row["path"] for row in rows)


def test_a_file_with_no_good_line_names_file_and_line(work: Path, ingot) -> None:
    (work / "talk.jsonl").write_text("not json\n")
    _refused(ingot("run", "tiny.toml", cwd=work), "talk.jsonl", "line 1")


@pytest.mark.slow
def test_a_missing_text_field_names_those_found(work: Path, ingot) -> None:
    (work / "talk.jsonl").write_text('{"body": "x", "title": "y"}\n')
    _refused(ingot("run", "tiny.toml", cwd=work), "talk.jsonl", "messages", "body", "title")


@pytest.mark.slow
def test_context_longer_than_the_data(work: Path, ingot) -> None:
    _recipe(work, ("context = 32", "context = 100000"))
    _refused(
        ingot("run", "tiny.toml", cwd=work),
        "base",
        "data.clean",
        "one row of context 100000",
        "smaller model.context",
    )
    stage = (work / "runs" / "tiny" / "base").resolve()
    assert not StageDir(stage).is_done()
    assert not (stage / "checkpoints").exists()
    plan = {row["name"]: row for row in json.loads(ingot("plan", "tiny.toml", "--json", cwd=work).stdout)}
    assert plan["base"]["state"] == "FAILED"
    assert "one row of context" in plan["base"]["why"]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small recipe run up to `base`; tests that damage it take a copy."""
    path = make_work(tmp_path_factory.mktemp("once"))
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "tiny.toml", "--only", "base"]
    subprocess.run(command, cwd=path, check=True, capture_output=True)
    return path


@pytest.fixture
def trained(run_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_once, tmp_path / "copy", symlinks=True))


@pytest.mark.slow
def test_a_damaged_store(trained: Path, ingot) -> None:
    """A flipped byte and a truncated file in a store: the next stage that reads it says which file, and ends."""
    ids = (trained / "runs" / "tiny" / "clean@bpe" / "train" / "ids.bin").resolve()
    data = bytearray(ids.read_bytes())
    data[100] ^= 1
    ids.write_bytes(data)
    again = ("run", "tiny.toml", "--only", "base", "--set", "stage.base.batch=4")
    _refused(ingot(*again, cwd=trained), "ids.bin")
    assert "ids.bin" in ingot("verify", "tiny.toml", cwd=trained).stderr
    ids.write_bytes(data[:-2])
    _refused(ingot(*again, cwd=trained), "ids.bin", f"{len(data) - 2:,}", f"{len(data):,}")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_an_older_one_has_to_be_named(trained: Path, ingot) -> None:
    root = (trained / "runs" / "tiny" / "base" / "checkpoints").resolve()
    (newest,) = (root / "00000060").glob("*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-4])
    command = ("generate", "runs/tiny/base", "the", "--max-new", "3")
    _refused(ingot(*command, cwd=trained), "the checkpoint of step 60 is damaged", "--step: ")
    _refused(ingot("export", "runs/tiny/base", "out", cwd=trained), "the checkpoint of step 60 is damaged")
    older = max(int(p.name) for p in root.glob("0*") if p.name != "00000060")
    result = ingot(*command, "--step", str(older), cwd=trained)
    assert result.returncode == 0, result.stderr
    _refused(ingot("verify", "tiny.toml", cwd=trained), "00000060")


@pytest.mark.slow
def test_another_tokenizer_is_refused(trained: Path, ingot) -> None:
    """A store whose manifest names another tokenizer than the model's."""
    stage = trained / "runs" / "tiny" / "clean@bpe"
    for split in ("train", "val"):
        manifest = (stage / split / "manifest.json").resolve()
        record = json.loads(manifest.read_text())
        record["tokenizer"] = "0" * 32
        manifest.write_text(json.dumps(record))
    _refused(
        ingot("run", "tiny.toml", "--only", "base", "--set", "stage.base.batch=4", cwd=trained), "tokenizer", "0" * 8
    )


@pytest.mark.parametrize("end", ["finished", "died", "interrupted"])
def test_a_second_run_waits_for_the_first(work: Path, ingot, end: str) -> None:
    """It then uses the result, or makes it if the first one has left none."""
    assert ingot("run", "tiny.toml", "--only", "clean", cwd=work).returncode == 0
    stage = StageDir((work / "runs" / "tiny" / "clean").resolve())
    (stage / "DONE").rename(work / "DONE")
    command = [sys.executable, "-m", "ingot", "run", "tiny.toml", "--only", "clean"]
    with stage.lock():
        second = subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert second.stderr
        printed = ""
        while "waiting" not in printed:
            printed += (line := second.stderr.readline())
            assert line, printed
        assert printed.endswith(f"clean: waiting for process {os.getpid()}, which is running this stage\n")
        if end == "interrupted":
            os.killpg(second.pid, signal.SIGINT)
            second.wait()
        elif end == "finished":
            (work / "DONE").rename(stage / "DONE")
    rest = second.communicate()[1]
    assert second.returncode == (130 if end == "interrupted" else 0), rest
    assert "waiting" not in rest
    assert ("clean: HIT, another process has made it" in rest) == (end == "finished")
    assert stage.is_done() == (end != "interrupted")
    starts = len(read_events(stage / "metrics.jsonl", "start"))
    assert starts == (2 if end == "died" else 1)


@pytest.mark.slow
def test_a_full_disk(work: Path, ingot) -> None:
    """A file system of 1 MB; the run ends with one sentence, and goes on where there is room."""
    small = work / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        error = _refused(ingot("run", "tiny.toml", "--out", "small", cwd=work), "disk is full", "free space")
        assert "run the same command again" in error
        assert not list(small.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        assert ingot("run", "tiny.toml", "--out", "small", "--only", "base", cwd=work).returncode == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.slow
def test_what_the_machine_refuses_is_a_sentence(work: Path, ingot) -> None:
    """A file where a directory is to be, a directory where a file is to be."""
    (work / "note.txt").write_text("here before")
    for out in ("note.txt", "note.txt/deeper"):
        for command in ("run", "plan"):
            _refused(ingot(command, "tiny.toml", "--out", out, cwd=work), "note.txt", "expected a directory")
    assert (work / "note.txt").read_text() == "here before"
    assert ingot("run", "tiny.toml", "--only", "clean", cwd=work).returncode == 0
    _refused(ingot("report", "tiny.toml", "--to", "runs", cwd=work), "runs", "found a directory")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DONE", "result.json"])
def test_a_damaged_file_of_a_stage_is_named(work: Path, ingot, name: str) -> None:
    assert ingot("run", "tiny.toml", "--only", "clean", cwd=work).returncode == 0
    stage = (work / "runs" / "tiny" / "clean").resolve()
    (work / "runs" / "stages" / "file-digests.json").write_text("[1]")  # only a memory of what can be read again
    assert ingot("status", "tiny.toml", cwd=work).returncode == 0
    (stage / name).write_bytes(b'{"torn": \xff\n')
    _refused(ingot("report", "tiny.toml", cwd=work), f"{stage.name}/{name}", "not readable", "delete that stage's")


@pytest.mark.slow
def test_no_memory_is_a_sentence(work: Path, ingot) -> None:
    huge = ingot("run", "tiny.toml", "--only", "base", "--set", "stage.base.model.width=100000000", cwd=work)
    _refused(huge, "base: there is not enough memory", "`ingot plan` shows how much")


def _training(work: Path, **options: Any) -> "subprocess.Popen[str]":
    """A long run, once it has made a step."""
    command = [sys.executable, "-m", "ingot", "run", "tiny.toml", "--set", "stage.base.duration='100000 steps'"]
    base = work / "runs" / "tiny" / "base"
    before = _steps(base)
    began = subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    _until(lambda: began.poll() is not None or _steps(base) > before)
    return began


def _steps(stage: Path) -> int:
    return len(read_events(stage / "metrics.jsonl", "step"))


@pytest.mark.slow
def test_a_run_that_ignores_interruptions_goes_on(work: Path) -> None:
    """As one that a script has sent to the background does."""
    began = _training(work, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    stage = StageDir((work / "runs" / "tiny" / "base").resolve())
    try:
        os.killpg(began.pid, signal.SIGINT)
        time.sleep(1)
        assert began.poll() is None
        assert stage.is_locked(), "the stage's process goes on too"
    finally:
        os.killpg(began.pid, signal.SIGKILL)
        began.communicate()


@pytest.mark.parametrize(
    ("number", "everybody"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, True, marks=pytest.mark.slow),
    ],
)
def test_who_asks_a_run_to_end_finds_it_saved(work: Path, number: int, everybody: bool) -> None:
    """The parent alone, as `kill` asks, or its process group, as a terminal and Slurm do."""
    _recipe(work, ("save_every = 5", "save_every = 1000000"))
    began = _training(work, start_new_session=True)
    (os.killpg if everybody else os.kill)(began.pid, number)
    _, rest = began.communicate()
    assert began.returncode == 128 + number, rest
    assert "Traceback" not in rest
    stage = StageDir((work / "runs" / "tiny" / "base").resolve())
    assert not stage.is_locked()
    assert f"saved after step {checkpoint_steps(stage / 'checkpoints')[0]:,}" in rest


SLOW = ('batch = 8\nduration = "60 steps"', 'batch = 3000\nduration = "60 steps"')
"""The recipe with steps of more than a second."""


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM)])
def test_who_asks_again_does_not_cost_what_was_learned(work: Path, numbers: tuple[int, int]) -> None:
    """As Slurm does, whose SIGTERM follows where the step takes long; Ctrl-C alone ends a run at once."""
    _recipe(work, SLOW)
    began = _training(work, start_new_session=True)
    stage = StageDir((work / "runs" / "tiny" / "base").resolve())
    for number in numbers:
        os.killpg(began.pid, number)
        time.sleep(0.2)
    _, rest = began.communicate()
    assert began.returncode == 128 + numbers[0], rest
    assert checkpoint_steps(stage / "checkpoints")
    assert "saved after step" in rest


@pytest.mark.slow
def test_a_terminal_that_closes_does_not_cost_what_was_learned(work: Path) -> None:
    """Both processes lose their standard error with it, and get SIGHUP from the system and from the shell."""
    _recipe(work, SLOW)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(work)
        os.execv(sys.executable, [sys.executable, "-m", "ingot", "run", "tiny.toml", "--only", "base"])
    threading.Thread(target=_drained, args=(terminal,), daemon=True).start()
    link = work / "runs" / "tiny" / "base"
    _until(lambda: _steps(link) > 0)
    stage = StageDir(link.resolve())
    os.killpg(pid, signal.SIGHUP)
    os.close(terminal)
    os.waitpid(pid, 0)
    _until(lambda: not stage.is_locked())
    assert checkpoint_steps(stage / "checkpoints")
    assert not read_events(stage / "metrics.jsonl", "failed")


def _until(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.05)


def _drained(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_torchrun_is_refused_with_a_sentence(work: Path, ingot) -> None:
    _refused(ingot("run", "tiny.toml", cwd=work, env={**os.environ, "WORLD_SIZE": "2"}), "WORLD_SIZE", "one process")
