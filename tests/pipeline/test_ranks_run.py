"""Whole runs on two ranks of this machine: killed, interrupted, stopped and wrong ones. INGOT_RANK_KILLS: kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ingot.core.artifact import CHECKPOINTS, checkpoint_steps
from ingot.core.events import read_events

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("INGOT_RANK_KILLS", "2"))
COMMAND = [
    sys.executable,
    "-c",
    "from ingot.cli.app import main; main()",
    "run",
    "tiny.toml",
    "--json",
    "--only",
    "base",
]


def _start(work: Path, *words: str, sets: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "--nproc", "2", *words, *(w for o in sets for w in ("--set", o))]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def _ranks(parent: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the children, in the order of ranks."""
    path = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def _wait_for_step(work: Path, parent: subprocess.Popen[bytes], step: int) -> None:
    """Until rank 0 has logged a step; or until the run has ended."""
    log = work / "runs" / "tiny" / "base" / "metrics.jsonl"
    while parent.poll() is None:
        if log.exists() and any(e["step"] >= step for e in read_events(log, "step")):
            return
        time.sleep(0.01)


def _wait_for_saving(work: Path, parent: subprocess.Popen[bytes]) -> None:
    """Until a checkpoint is being written, which takes milliseconds; or until the run has ended."""
    checkpoints = work / "runs" / "tiny" / "base" / CHECKPOINTS
    while parent.poll() is None:
        if checkpoints.exists() and any(name.endswith(".tmp") for name in os.listdir(checkpoints)):
            return


def _losses(work: Path, stage: str = "base") -> np.ndarray:
    log = work / "runs" / "tiny" / stage / "metrics.jsonl"
    return np.array([e["loss_nats"] for e in read_events(log, "step")])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    from tests.pipeline.conftest import make_work

    work = make_work(tmp_path_factory.mktemp("alone"))
    assert subprocess.run(COMMAND, cwd=work, stdout=subprocess.DEVNULL).returncode == 0
    return work


@pytest.fixture
def work(tmp_path: Path) -> Path:
    from tests.pipeline.conftest import make_work

    return make_work(tmp_path / "work")


@pytest.mark.parametrize("mesh", ["{}", "{ shard = 2 }"])
def test_D11_ranks_train_what_one_process_trains(mesh: str, alone: Path, work: Path) -> None:
    assert _start(work, sets=(f"stage.base.mesh={mesh}",)).wait() == 0
    np.testing.assert_allclose(_losses(work), _losses(alone), rtol=1e-4)
    results = [json.loads((w / "runs" / "tiny" / "base" / "result.json").read_text()) for w in (alone, work)]
    assert results[0]["val_loss_nats"] == pytest.approx(results[1]["val_loss_nats"], rel=1e-4)
    assert results[0]["tokens"] == results[1]["tokens"]
    assert (work / "runs" / "tiny" / "base" / "ranks" / "1.jsonl").exists()


@pytest.mark.parametrize("mesh", [pytest.param("{}", marks=pytest.mark.long), "{ shard = 2 }"])
def test_D12_killed_ranks_start_again_and_end_like_an_undisturbed_run(mesh: str, work: Path, tmp_path: Path) -> None:
    """Ranks killed at random moments and while saving; the losses are those of the undisturbed run."""
    from tests.pipeline.conftest import make_work

    straight = make_work(tmp_path / "straight")
    sets = (f"stage.base.mesh={mesh}", f"stage.base.loop.restarts={KILLS}")
    assert _start(straight, sets=sets).wait() == 0
    draw, parent, killed = random.Random(7), _start(work, sets=sets), 0
    while parent.poll() is None and killed < KILLS:
        _wait_for_step(work, parent, 4 + 40 * killed // KILLS)
        if killed % 2:
            _wait_for_saving(work, parent)
        else:
            time.sleep(draw.uniform(0, 0.3))
        children = _ranks(parent)
        if len(children) == 2:
            os.kill(draw.choice(children), signal.SIGKILL)
            killed += 1
            while parent.poll() is None and set(_ranks(parent)) & set(children):
                time.sleep(0.01)
    assert parent.wait() == 0
    assert "ended by SIGKILL; starting again" in (work / "log.txt").read_text()
    np.testing.assert_array_equal(_losses(work), _losses(straight))


def test_D12_an_interrupted_run_saves_once_and_leaves_no_process(work: Path) -> None:
    parent = _start(work)
    _wait_for_step(work, parent, 7)
    children = _ranks(parent)
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait() in (130, 143)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    stage = work / "runs" / "tiny" / "base"
    assert checkpoint_steps(stage / CHECKPOINTS)[0] == read_events(stage / "metrics.jsonl", "step")[-1]["step"]
    assert not list((stage / CHECKPOINTS).glob(".*.tmp"))
    assert _start(work).wait() == 0


def test_D12_a_stopped_rank_is_named_and_the_run_goes_on(work: Path) -> None:
    """On a busy machine ranks are also taken for hanging while they start, and start again."""
    parent = _start(work, sets=("stage.base.loop.hang_minutes=0.2", "stage.base.loop.restarts=1000"))
    _wait_for_step(work, parent, 7)
    while parent.poll() is None and len(children := _ranks(parent)) < 2:
        time.sleep(0.01)
    os.kill(children[1], signal.SIGSTOP)
    assert parent.wait() == 0
    assert "rank 1 does not move: step" in (work / "log.txt").read_text()


@pytest.mark.long
def test_D11_parts_start_from_a_model_and_keep_to_a_reference(work: Path, tmp_path: Path) -> None:
    """Both are read in parts."""
    from tests.pipeline.conftest import make_work

    one = make_work(tmp_path / "one")
    keep = 'stage.chat.penalties=[{ kind = "kl", weight = 0.3 }]'
    for path, words in ((one, ()), (work, ("--nproc", "2", "--set", "stage.chat.mesh={ shard = 2 }"))):
        command = [*COMMAND[:-1], "chat", "--set", keep, *words]
        assert subprocess.run(command, cwd=path, stdout=subprocess.DEVNULL).returncode == 0
    np.testing.assert_allclose(_losses(work, "chat"), _losses(one, "chat"), rtol=1e-4)


def test_D11_a_mesh_that_does_not_fit_is_refused_before_anything_starts(work: Path) -> None:
    assert _start(work, sets=("stage.base.mesh={ shard = 3 }",)).wait() == 2
    assert "base: mesh: found replicate any x shard 3 for a run of 2 processes" in (work / "log.txt").read_text()
    assert not (work / "runs" / "tiny" / "base").exists()


def test_D11_torchrun_starts_the_same_ranks(alone: Path, work: Path) -> None:
    one = [*COMMAND, "--only", "clean@bpe"]
    assert subprocess.run([*COMMAND[:-1], "clean@bpe"], cwd=work, stdout=subprocess.DEVNULL).returncode == 0, one
    script = work / "main.py"
    script.write_text("from ingot.cli.app import main\nmain()\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *COMMAND[3:]], cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    np.testing.assert_allclose(_losses(work), _losses(alone), rtol=1e-4)
