"""`ingot verify-resume`: proves on a user's own recipe that a killed run ends like one that was not.

The first steps of a train stage run twice from the same inputs, in a temporary directory: once undisturbed, once killed
with SIGKILL at random moments and started again. The checkpoints of the last of these steps are compared byte by byte.
"""

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.artifact import CHECKPOINTS, STATE, checkpoint_path, checkpoint_problem, checkpoint_steps, read_json
from ingot.core.errors import UserError
from ingot.core.events import METRICS, attempts
from ingot.pipeline.graph import Graph
from ingot.pipeline.run import job_of, run, start_child
from ingot.pipeline.tune import train_stage

POLL_S = 0.02
CHECKPOINTS_BETWEEN_KILLS = 2
"""Checkpoints that are written between two kills, so that some kills come while one is written."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of the comparison."""

    stage: str
    steps: int
    resumed_from: list[int]
    """The step that each start after a kill went on from; 0: from the beginning."""
    tensors: int
    bytes: int
    differences: list[str]
    """What differs, by name; empty if the runs are equal to the bit."""


def verify_resume(
    graph: Graph, stage: str, steps: int, kills: int, notify: Callable[[str], None], seed: int = 0
) -> Verdict:
    """Run the first steps of a train stage undisturbed and killed, and compare the last checkpoints.

    Args:
        stage: name of the train stage. What it needs runs first, where it is not done.
        steps: steps of both runs; fewer if the stage has fewer.
        kills: how often the second run is killed.
        notify: receives progress lines.
        seed: of the moments of the kills.

    Raises:
        UserError: not a train stage, or the stage's process ended with an error, which it has printed.
    """
    node, draw = train_stage(graph, stage), random.Random(seed)
    run(graph, [n.name for n in node.inputs.values()], lambda *_: None)
    job = job_of(graph, node, quiet=True)
    every = max(1, steps // (CHECKPOINTS_BETWEEN_KILLS * (kills + 1)))
    with tempfile.TemporaryDirectory(prefix="ingot-verify-") as directory:
        undisturbed, killed = (Path(directory) / name for name in ("undisturbed", "killed"))
        notify(f"{stage}: {steps:,} steps without a disturbance")
        _Process(job, undisturbed, steps, steps).run_to(steps)
        saved = checkpoint_steps(undisturbed / CHECKPOINTS)
        last = min((step for step in saved if step >= steps), default=saved[0])  # the run may have been faster
        for kill in range(kills):
            reached = _Process(job, killed, every, last).kill_after(
                draw.randint(kill * last // kills, (kill + 1) * last // kills)
            )
            for step in checkpoint_steps(killed / CHECKPOINTS):
                if step >= last:  # it was faster than the kill, and what is compared is to be of a resumed run
                    shutil.rmtree(checkpoint_path(killed / CHECKPOINTS, step))
            notify(f"killed {kill + 1:,} of {kills:,} times, after step {reached:,}")
        _Process(job, killed, every, last).run_to(last)
        resumed_from = [attempt.resumed_from or 0 for attempt in attempts(killed / METRICS)[1:]]
        a, b = (checkpoint_path(path / CHECKPOINTS, last) for path in (undisturbed, killed))
        names, size = _compare(a, b)
        differences = [name for name, same in names.items() if not same]
        if problem := checkpoint_problem(b):
            differences.append(problem)
        return Verdict(stage, last, resumed_from, len(names) - 1, size, differences)


class _Process:
    """A stage's process in a directory of its own, which writes a checkpoint every `every` steps and at step `last`."""

    def __init__(self, job: dict[str, Any], directory: Path, every: int, last: int):
        keep = {"save_every": every, "keep_every": last, "keep": 1_000_000, "log_every": 1}
        settings = {**job["settings"], "loop": {**job["settings"]["loop"], **keep}}
        self.directory, self.stage = directory, job["name"]
        self._before = len(attempts(directory / METRICS))
        self._child: subprocess.Popen[bytes] = start_child(
            {**job, "settings": settings, "dir": str(directory), "sinks": []}
        )

    def run_to(self, step: int) -> None:
        """Wait for the checkpoint of a step or for the end of the stage, then end the process."""
        self._end_when(lambda: any(s >= step for s in checkpoint_steps(self.directory / CHECKPOINTS)))

    def kill_after(self, step: int) -> int:
        """End the process after it has logged a step. Returns the last step that it logged."""
        self._end_when(lambda: (self._last_step() or 0) >= max(1, step))
        return self._last_step() or 0

    def _last_step(self) -> int | None:
        """The last step that this process has logged."""
        own = attempts(self.directory / METRICS)[self._before :]
        return own[-1].last_step if own else None

    def _end_when(self, condition: Callable[[], bool]) -> None:
        try:
            while self._child.poll() is None and not condition():
                time.sleep(POLL_S)
        finally:
            self._child.kill()
            code = self._child.wait()
        if code > 0:
            raise UserError(f"{self.stage}: the process ended with exit code {code}; its message is above")


def _compare(a: Path, b: Path) -> tuple[dict[str, bool], int]:
    """Whether each tensor and the state are the same in two checkpoints, and the bytes of all tensors."""
    names: dict[str, bool] = {STATE: read_json(a / STATE) == read_json(b / STATE)}
    size = 0
    for file in sorted(a.glob("*.safetensors")):
        ours, theirs = _tensors(file), _tensors(b / file.name)
        names |= {name: ours.get(name) == theirs.get(name) for name in [*ours, *(n for n in theirs if n not in ours)]}
        size += sum(len(data) for _, data in ours.values())
    return names, size


def _tensors(file: Path) -> dict[str, tuple[str, bytes]]:
    """Name -> dtype with shape, and bytes, of a safetensors file (read here, as the parent imports no torch)."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (f"{one['dtype']} {one['shape']}", data[start + one["data_offsets"][0] : start + one["data_offsets"][1]])
        for name, one in header.items()
    }
