"""`ingot tune`: which execution is fastest for a training stage on this machine, by trying each on its own steps.

A candidate is the stage itself with other execution settings, run as it would be run (a process of its own, with its
allocator) in a directory that is thrown away, and stopped after some steps. Nothing that it chooses changes what is
learned. The winner's `execution.json` is laid where the stage keeps the choices that it began with, so the next
`ingot run` begins with them; explicit settings of the recipe still win.

Rejected: timing made-up steps (they know neither the recipe's rows nor its objective), and every combination (each
costs a start of a process, and how many rows go at once hardly depends on the rest).
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.artifact import CHECKPOINTS, atomic_json
from ingot.core.errors import UserError
from ingot.core.events import METRICS, read_events
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import job_of, run, start_child
from ingot.stages.job import CHOICES
from ingot.stages.kind import Node
from ingot.stages.training.settings import TrainSettings

PATIENCE = 300.0
"""Seconds after which a candidate that has not made its steps is given up."""
Candidate = dict[str, Any]
"""precision, and settings of `loop`; what is missing is left to the recipe and the machine."""


@dataclass(frozen=True)
class Trial:
    """What a candidate came to."""

    candidate: Candidate
    step_s: float
    """Median seconds of a step."""
    start_s: float
    """Seconds from the start of the process to its first finished step."""
    total_s: float
    """Of the whole run: the start, and as many steps as it has."""
    execution: dict[str, Any]


def tune(
    recipe: Path, overrides: list[str], stage: str, root: Path, steps: int, say: Callable[[str], None]
) -> tuple[list[Trial], Path]:
    """Try candidates on a train stage and write down the winner's choices for it.

    Returns: the trials, that with the shortest run first, and the file that the choices were written to.

    Raises:
        UserError: it is no train stage, it has begun already, or not even plain torch could run it.
    """
    graph = load_graph(recipe, overrides, root)
    node = _train_stage(graph, stage)
    place = graph.stage(node)
    if place.is_done() or (place / CHECKPOINTS).exists():
        raise UserError(f"{stage}: found that it ran already ({place.path}), expected a stage that has not begun")
    run(graph, [n.name for n in node.inputs.values()], lambda *_: None)
    trials: list[Trial] = []
    for candidate in _candidates(node.settings, trials):
        say(f"trying {described(candidate)}")
        if trial := _tried(job_of(graph, node, quiet=True), candidate, steps):
            say(
                f"  {trial.step_s * 1e3:,.0f} ms a step, {trial.start_s:.0f} s to the first, run {trial.total_s:,.0f} s"
            )
            trials.append(trial)
    if not trials:
        raise UserError(f"{stage}: found no candidate that ran; run the stage by itself to see why")
    trials.sort(key=lambda t: t.total_s)
    place.path.mkdir(parents=True, exist_ok=True)
    atomic_json(place / CHOICES, trials[0].execution)
    return trials, place / CHOICES


def described(candidate: Candidate) -> str:
    """A candidate in words."""
    return ", ".join(f"{name} {value}" for name, value in candidate.items())


def _train_stage(graph: Graph, stage: str) -> Node:
    trained = [n.name for n in graph.nodes.values() if isinstance(n.settings, TrainSettings)]
    if stage not in trained:
        raise UserError(f"stage: found {stage!r}, expected a train stage of the recipe: {', '.join(trained)}")
    return graph.nodes[stage]


def _candidates(settings: Any, trials: list[Trial]) -> Iterator[Candidate]:
    """PyTorch in fp32, the choice of `auto`, the other backends, then fewer rows and threads with the best.

    What the recipe sets stays as it is: a run would not take another choice.
    """
    assert isinstance(settings, TrainSettings)
    asked = settings.loop.backend
    if settings.precision == "auto":
        yield {"precision": "fp32", "backend": "torch" if asked == "auto" else asked}
    yield {"backend": asked}
    if asked == "auto":
        taken = trials[-1].execution["backend"] if trials and trials[-1].candidate == {"backend": "auto"} else None
        yield from ({"backend": name} for name in ("torch", "compiled") if name != taken)
    if not trials:
        return
    best = min(trials, key=lambda t: t.total_s)
    rows = int(best.execution["micro_batch"])
    if settings.loop.micro_batch is None:
        for fewer in (rows // 2, rows // 4):
            if fewer:
                yield {**best.candidate, "micro_batch": fewer}
    threads = int(best.execution["threads"])
    if settings.loop.threads is None and threads > 1:
        yield {**best.candidate, "threads": threads // 2}


def _tried(job: dict[str, Any], candidate: Candidate, steps: int) -> Trial | None:
    """Run the stage until it has made `steps` steps; None where it could not."""
    loop = {n: v for n, v in candidate.items() if n != "precision"}
    settings = job["settings"]
    chosen = {"precision": candidate.get("precision", settings["precision"])}
    settings = {**settings, **chosen, "loop": {**settings["loop"], "log_every": 1, **loop}}
    with tempfile.TemporaryDirectory(prefix="ingot-tune-") as name:
        path = Path(name) / "stage"
        began, wall = time.monotonic(), time.time()
        child = start_child({**job, "settings": settings, "dir": str(path), "sinks": []})
        try:
            while child.poll() is None and time.monotonic() - began < PATIENCE:
                if len(_steps(path)) > steps:
                    break
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        made = _steps(path)
        if len(made) < 3:
            if child.returncode == 0:
                raise UserError(f"{job['name']}: found {len(made)} steps, expected 3 or more to time; just run it")
            return None
        planned = read_events(path / METRICS, "plan")[-1]["steps"]
        step_s = statistics.median(e["tokens"] / e["tok_s"] for e in made[1:])
        start_s = made[0]["time"] - wall
        execution = json.loads((path / CHOICES).read_text())
        return Trial(candidate, step_s, start_s, start_s + (planned - 1) * step_s, execution)


def _steps(path: Path) -> list[dict[str, Any]]:
    return read_events(path / METRICS, "step") if (path / METRICS).exists() else []
