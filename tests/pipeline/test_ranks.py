"""The ranks of a stage: who failed first, who hangs, how often all start again, and that no process is left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.core.heartbeat import WAITING, Heartbeat
from ingot.core.ranks import LOST_PEER, heartbeat_file, log_file
from ingot.distributed import group
from ingot.pipeline import ranks
from ingot.pipeline.ranks import Child, Watch, hanging, rank_environment, run_ranks


class Ranks:
    """Small processes in place of ranks: `code` is Python, with `rank` and `attempt`."""

    def __init__(self, code: str):
        self.code, self.children, self.started = code, [], 0

    def __call__(self, environment: Mapping[str, str]) -> Child:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        text = f"import os, signal, sys, time; rank, attempt = {rank}, {self.started // size}\n{self.code}"
        child = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, **environment})
        self.children.append(child)
        self.started += 1
        return child

    def run(
        self, directory: Path, size: int = 2, restarts: int = 2, hang_seconds: float = 1e6
    ) -> tuple[int, list[str]]:
        told: list[str] = []
        code = run_ranks(
            self, size, directory, restarts=restarts, hang_seconds=hang_seconds, notify=told.append, poll_seconds=0.01
        )
        assert all(child.poll() is not None for child in self.children)
        return code, told


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.5)


def test_D11_ranks_that_end_well_end_the_stage(tmp_path: Path) -> None:
    made = Ranks("sys.exit(0)")
    assert made.run(tmp_path, size=3) == (0, [])
    assert len(made.children) == 3


def test_D11_a_killed_rank_is_named_and_all_start_again(tmp_path: Path) -> None:
    """The other rank only lost its peer."""
    made = Ranks(
        "if attempt: sys.exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(0.1)\n"
        f"sys.exit({LOST_PEER})"
    )
    code, told = made.run(tmp_path)
    assert (code, told) == (0, ["rank 1 ended by SIGKILL; starting again from the newest checkpoint (1 of 2)"])
    assert len(made.children) == 4


def test_D11_a_rank_that_never_notices_is_ended(tmp_path: Path) -> None:
    made = Ranks("time.sleep(1000) if rank == 0 else sys.exit(1)")
    code, told = made.run(tmp_path, restarts=0)
    assert (code, told) == (1, ["rank 1 failed with exit code 1; it was the first failure, so the run ends"])
    assert made.children[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("code", [2, 130])
def test_D11_a_users_error_and_an_interruption_end_the_run_at_once(code: int, tmp_path: Path) -> None:
    made = Ranks(f"sys.exit({code}) if rank else sys.exit({LOST_PEER})")
    assert made.run(tmp_path) == (code, [])
    assert len(made.children) == 2


def test_D11_a_run_that_fails_again_and_again_ends(tmp_path: Path) -> None:
    made = Ranks("sys.exit(1)")
    code, told = made.run(tmp_path)
    assert code == 1
    assert told[-1].endswith("failed with exit code 1; it was the third failure, so the run ends")
    assert len(made.children) == 6


def test_D11_an_interruption_reaches_every_rank_once(tmp_path: Path) -> None:
    """Each counts its signals; the interruption itself goes on to the caller."""
    made = Ranks(
        "signal.signal(signal.SIGTERM, lambda *_: open(str(rank), 'a').write('x'))\n"
        "open(f'up{rank}', 'w').close()\n"
        "while not os.path.exists(str(rank)): time.sleep(0.01)\n"
        "time.sleep(0.2); sys.exit(130)"
    )
    here = Path.cwd()
    os.chdir(tmp_path)
    try:

        def interrupt() -> None:
            while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            made.run(tmp_path)
    finally:
        os.chdir(here)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["x", "x"]
    assert [child.returncode for child in made.children] == [130, 130]


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        (
            [(5, "training", 95, 99), (5, WAITING, 95, 99)],
            "rank 0 does not move: step 5, training, for 5 s; its process runs",
        ),
        (
            [(5, WAITING, 95, 99), (5, WAITING, 94, 90)],
            "rank 1 does not move: step 5, " + WAITING + ", for 6 s; its process is stopped",
        ),
        (
            [(6, WAITING, 95, 99), (5, WAITING, 94, 99)],
            "rank 1 does not move: step 5, " + WAITING + ", for 6 s; its process runs",
        ),
        ([(5, "training", 97, 99), (5, WAITING, 90, 99)], None),
    ],
)
def test_D11_the_rank_that_keeps_the_others_waiting_is_named(beats: list[tuple], named: str | None) -> None:
    made = [Heartbeat(step, phase, moved, written) for step, phase, moved, written in beats]
    failure = hanging(made, now=100.0, started=0.0, hang_seconds=4.0)
    assert (failure and str(failure)) == named


def test_D11_ranks_share_the_cores_and_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = [rank_environment(rank, 4, tmp_path / "store") for rank in range(4)]
    assert [e["RANK"] for e in made] == ["0", "1", "2", "3"]
    assert {(e["OMP_NUM_THREADS"], e["WORLD_SIZE"], e["INGOT_STORE"]) for e in made} == {
        ("2", "4", str(tmp_path / "store"))
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rank_environment(0, 4, tmp_path / "store")["OMP_NUM_THREADS"] == "3"


def test_a_machine_that_slept_has_no_rank_that_hangs(tmp_path: Path) -> None:
    """The ranks' clocks are hours ahead; only what this process sees while it runs counts."""
    files = [heartbeat_file(tmp_path, rank) for rank in range(2)]
    files[0].parent.mkdir()

    def write(*beats: Heartbeat) -> None:
        for file, beat in zip(files, beats, strict=True):
            file.write_text(json.dumps(asdict(beat)))

    watch = Watch(files)
    assert watch.read(now=0.0) == [None, None]
    write(Heartbeat(5, "training", 1000.0, 1001.0), Heartbeat(5, WAITING, 1000.0, 1001.0))
    assert watch.read(now=1.0) == [Heartbeat(5, "training", 1.0, 1.0), Heartbeat(5, WAITING, 1.0, 1.0)]
    write(Heartbeat(5, "training", 1000.0, 9000.0), Heartbeat(6, WAITING, 9000.0, 9000.0))
    assert watch.read(now=2.0) == [Heartbeat(5, "training", 1.0, 2.0), Heartbeat(6, WAITING, 2.0, 2.0)]
    assert hanging(watch.read(now=3.0), now=3.0, started=0.0, hang_seconds=60.0) is None
    failure = hanging(watch.read(now=62.0), now=62.0, started=0.0, hang_seconds=60.0)
    assert str(failure) == "rank 0 does not move: step 5, training, for 61 s; its process is stopped"


def test_a_rank_that_has_started_is_ended_if_the_next_one_cannot_start(tmp_path: Path) -> None:
    made = Ranks("time.sleep(1000)")

    def start(environment: Mapping[str, str]) -> Child:
        if environment["RANK"] == "1":
            raise OSError("no process is left")
        return made(environment)

    with pytest.raises(OSError, match="no process is left"):
        run_ranks(start, 2, tmp_path, restarts=0, hang_seconds=1e6, notify=lambda text: None)
    assert [child.returncode for child in made.children] == [-signal.SIGKILL]


STAGE = """
import json, time
from ingot.core.errors import UserError
from ingot.distributed import mesh
from ingot.stages import child

def build(job, kind, out, log, display):
    ranks = mesh.current()
    ranks.wait()
    {body}
    ranks.wait()

child._build = build
child.die_with_parent = lambda parent: None
sys.stdin = open("job.json")
sys.exit(child.main())
"""
"""A stage of two real ranks with a short builder."""
ALONE = "if ranks.rank: raise UserError('lr: found 9, expected 1')"
ALL = "raise UserError('lr: found 9, expected 1')"


@pytest.mark.parametrize(("body", "speaker"), [(ALONE, "rank 1: "), pytest.param(ALL, "", marks=pytest.mark.slow)])
def test_an_error_of_one_rank_or_of_all_is_told_once(
    body: str, speaker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank that only lost the other one logs the other one's reason, which `ingot status` shows."""
    monkeypatch.setattr(ranks, "_GRACE_S", 60.0)  # both log why they end
    monkeypatch.chdir(tmp_path)
    stage = tmp_path / "stage"
    fields = {"name": "base", "kind": "train", "dir": str(stage), "root": str(tmp_path), "key": "k", "parent": 0}
    others = ("version", "seed", "canonical", "raw", "files")
    job = {**fields, **dict.fromkeys(others), "settings": {}, "inputs": {}, "recipe": {}, "quiet": True}
    (tmp_path / "job.json").write_text(json.dumps(job))
    earlier = stage / "ranks" / ".failure.tmp"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('[2, "another attempt"]')
    assert Ranks(STAGE.format(body=body)).run(stage) == (2, [])
    assert capfd.readouterr().err.splitlines() == ["base: lr: found 9, expected 1"]
    first, second = (read_events(file, "failed") for file in (stage / "metrics.jsonl", log_file(stage, 1)))
    assert [e["why"] for e in second] == ["lr: found 9, expected 1"]
    assert [e["why"] for e in first] == [f"{speaker}lr: found 9, expected 1"]


def test_ranks_without_a_gpu_each_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(group, "write_heartbeat", lambda path: None)
    for name, value in {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"found 2 GPUs for more ranks .* start fewer, or set loop.device"):
        group.joined(tmp_path, "auto").__enter__()
