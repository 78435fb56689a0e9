"""`kill -9` and `kill` at random moments of a whole run; the same command goes on, to the same numbers to the bit.

INGOT_KILLS is the number of SIGKILLs (six in CI, a hundred in `make soak`), INGOT_TERMS that of SIGTERMs in each phase
of training (one and twenty). With INGOT_SOAK, a directory, an interrupted test goes on with the life that it was in.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ingot.core.artifact import CHECKPOINTS, StageDir, checkpoint_path, checkpoint_steps
from ingot.core.events import METRICS, VOLATILE, attempts, read_events, stable

KILLS, TERMS = int(os.environ.get("INGOT_KILLS", "6")), int(os.environ.get("INGOT_TERMS", "1"))
MOMENTS = ("clean", "bpe", "clean@bpe", "base", "chat", "talk@bpe", "card")
"""Stages to be killed in, or `STAGE saving`: the instant when one of its checkpoints is half written."""
SAVING = ("base saving", "chat saving")
PHASES = ("base", "base saving", "chat")
SHORT = ("clean", "bpe", "clean@bpe", "talk@bpe")


class Life(NamedTuple):
    """A start of the run, and how it ends."""

    moment: str
    signal: int
    damage: bool
    """Whether a bit of the newest checkpoint flips afterwards."""

    @property
    def stage(self) -> str:
        return self.moment.partition(" ")[0]


def _lives() -> Iterator[Life]:
    """Half of the kills while saving, and a bit flips after one in four of these."""
    for number in range(KILLS):
        moment = SAVING[number // 2 % 2] if number % 2 else MOMENTS[number // 2 % len(MOMENTS)]
        yield Life(moment, signal.SIGKILL, number % 8 == 3)
    for number in range(TERMS * len(PHASES)):
        yield Life(PHASES[number % len(PHASES)], signal.SIGTERM, False)


def _start(work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "tiny.toml", "--json"]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def _wait_for(life: Life, work: Path, parent: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Until the moment has come, plus a random instant; or until the run has ended."""
    link, saves = work / "runs" / "tiny" / life.stage, draw.randint(1, 3) if "saving" in life.moment else 0
    saving = False
    while parent.poll() is None:
        if saves:
            before, saving = saving, any((link / CHECKPOINTS).glob(".*.tmp"))
            saves -= saving and not before
            if saving and not saves:
                return
        elif link.exists() and not (link / "DONE").exists():
            time.sleep(draw.uniform(0, 0.006 if life.moment in SHORT else 3))
            return
        time.sleep(0.0005)


def _alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _numbers(work: Path) -> dict[str, object]:
    """All that two equal runs agree on: results, tables, and every logged step."""
    found: dict[str, object] = {}
    for link in sorted((work / "runs" / "tiny").iterdir()):
        if not link.is_dir():
            continue
        result = json.loads((link / "result.json").read_text())
        found[f"{link.name}/result"] = {k: v for k, v in result.items() if k not in VOLATILE}
        if (link / "table.jsonl").exists():
            found[f"{link.name}/table"] = (link / "table.jsonl").read_text()
        steps = [stable(e) for e in read_events(link / "metrics.jsonl") if "step" in e]
        found[f"{link.name}/steps"] = sorted(json.dumps(e, sort_keys=True) for e in steps)
    return found


def _live(life: Life, number: int, work: Path, draw: random.Random) -> bool:
    """Start the run and end it at its moment. Returns whether the signal hit the stage."""
    link = work / "runs" / "tiny" / life.stage
    before, parent = len(attempts(link / METRICS)), _start(work)
    _wait_for(life, work, parent, draw)
    if parent.poll() is not None:  # the moment has passed in an earlier life: anew
        shutil.rmtree(work / "runs")
        before, parent = 0, _start(work)
        _wait_for(life, work, parent, draw)
    if life.signal == signal.SIGKILL and number % 4 < 2:
        parent.kill()  # the parent alone: its child must die with it
    else:
        os.killpg(parent.pid, life.signal)
    parent.wait()
    while _alive(parent.pid):  # a child that outlives its parent never ends this loop
        time.sleep(0.01)
    hit = not (link / "DONE").exists()
    steps, made = checkpoint_steps(link / CHECKPOINTS), attempts(link / METRICS)[before:]
    if hit and life.signal == signal.SIGTERM and made and (last := made[-1].last_step):
        assert steps[:1] == [last], f"ended in order at step {last}, and saved {steps}"
    if life.damage and len(steps) > 1:
        _flip_a_bit(checkpoint_path(link / CHECKPOINTS, steps[0]), draw)
    return hit


def _flip_a_bit(directory: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(directory.iterdir()))
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _directory(temporary: Path) -> Path:
    """Where the test works: what INGOT_SOAK names, made anew unless a test was interrupted in it."""
    directory = Path(os.environ.get("INGOT_SOAK", temporary))
    if (directory / "complete").exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.mark.slow
def test_killed_runs_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    from tests.pipeline.conftest import make_work

    directory = _directory(tmp_path)
    straight, killed = (directory / name for name in ("straight", "killed"))
    for work in (straight, killed):
        if not (work / "tiny.toml").exists():
            shutil.rmtree(work, ignore_errors=True)
            make_work(work)
    assert _start(straight).wait() == 0
    journal = directory / "lives.jsonl"
    landed = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    for number, life in list(enumerate(_lives()))[len(landed) :]:
        landed.append([*life, _live(life, number, killed, random.Random(number))])
        with journal.open("a") as file:
            file.write(json.dumps(landed[-1]) + "\n")
    last = _start(killed)
    assert last.wait() == 0, (killed / "log.txt").read_text()[-3000:]
    assert sum(hit for *_, hit in landed) >= len(landed) / 2, f"too few signals hit their stage: {landed}"
    assert _numbers(killed) == _numbers(straight)
    for link in (killed / "runs" / "tiny").iterdir():
        if link.is_dir():
            assert StageDir(link.resolve()).verify() == []
    (directory / "complete").touch()
