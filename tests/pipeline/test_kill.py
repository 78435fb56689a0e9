"""`kill -9` and `kill` at random moments of a whole run; the same command goes on, to the same numbers to the bit.

INGOT_KILLS sets the number of kills (six in CI, fifty in `make soak`).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.core.artifact import StageDir
from ingot.core.events import VOLATILE, read_events, stable

KILLS = int(os.environ.get("INGOT_KILLS", "6"))
MOMENTS = ("clean", "bpe", "clean@bpe", "talk@bpe", "base", "saving", "chat", "card")
"""Stages to be killed in; `saving` is the instant when a checkpoint of `base` is half written."""


def _start(work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "tiny.toml", "--json"]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def _wait_for(moment: str, work: Path, parent: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Until the moment has come, plus a random instant; or until the run has ended."""
    link = work / "runs" / "tiny" / ("base" if moment == "saving" else moment)
    while parent.poll() is None:
        if moment == "saving":
            if list((link / "checkpoints").glob(".*.tmp")):
                return
        elif link.exists() and not (link / "DONE").exists():
            time.sleep(draw.uniform(0, 0.006 if moment in ("clean", "bpe", "clean@bpe", "talk@bpe") else 3))
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


@pytest.mark.slow
def test_killed_runs_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    from tests.pipeline.conftest import make_work

    straight, killed = make_work(tmp_path / "straight"), make_work(tmp_path / "killed")
    assert _start(straight).wait() == 0
    draw = random.Random(11)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(KILLS)]
    if len(MOMENTS) > KILLS:
        moments = ["clean", "bpe", "clean@bpe", "base", "saving", "chat"][:KILLS]
    landed = []
    for number, moment in enumerate(moments):
        parent = _start(killed)
        _wait_for(moment, killed, parent, draw)
        if parent.poll() is not None:  # the moment has passed in an earlier life: anew
            subprocess.run(["rm", "-rf", str(killed / "runs")], check=True)
            parent = _start(killed)
            _wait_for(moment, killed, parent, draw)
        match number % 3:
            case 0:
                parent.kill()  # the parent alone: its child must die with it
            case 1:
                os.killpg(parent.pid, signal.SIGKILL)
            case 2:
                os.killpg(parent.pid, signal.SIGTERM)  # as a scheduler asks: in order
        parent.wait()
        while _alive(parent.pid):  # a child that outlives its parent never ends this loop
            time.sleep(0.01)
        link = killed / "runs" / "tiny" / ("base" if moment == "saving" else moment)
        landed.append(not (link / "DONE").exists())
    last = _start(killed)
    assert last.wait() == 0, (killed / "log.txt").read_text()[-3000:]
    assert sum(landed) >= KILLS / 2, f"too few kills hit their stage: {list(zip(moments, landed, strict=True))}"
    assert _numbers(killed) == _numbers(straight)
    for link in (killed / "runs" / "tiny").iterdir():
        if link.is_dir():
            assert StageDir(link.resolve()).verify() == []
