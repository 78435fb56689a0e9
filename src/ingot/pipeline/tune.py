"""`ingot tune`: finds the fastest execution settings of a train stage on this machine.

Each candidate runs the stage itself with other execution settings, in a process of its own and a temporary directory,
and is stopped after some steps. The best candidate's `execution.json` is copied to the stage's directory, so the next
`ingot run` starts with it. Settings in the recipe take precedence.

Not every combination is tried, because each costs the start of a process, and the best micro-batch hardly depends on
the backend.
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
from ingot.stages.job import EXECUTION_FILE
from ingot.stages.kind import Node
from ingot.stages.training.settings import TrainSettings

TIMEOUT_S = 300.0
"""Seconds after which a candidate is stopped before it has finished its steps."""
Candidate = dict[str, Any]
"""Values of `precision` and of settings of `loop`; the others are those of the recipe."""


@dataclass(frozen=True)
class Trial:
    """The measurements of a candidate."""

    candidate: Candidate
    step_s: float
    """Median seconds of a step."""
    start_s: float
    """Seconds from the start of the process to the end of its first step."""
    total_s: float
    """Estimated seconds of the complete run: the start and all steps."""
    execution: dict[str, Any]
    """Content of its `execution.json`."""


def tune(
    recipe: Path, overrides: list[str], stage: str, root: Path, steps: int, notify: Callable[[str], None]
) -> tuple[list[Trial], Path]:
    """Time candidates on a train stage and write the settings of the fastest.

    Args:
        recipe: the recipe.
        overrides: `--set` strings.
        stage: name of the train stage.
        root: output root.
        steps: steps of each candidate.
        notify: receives progress lines.

    Returns:
        The trials, shortest run first, and the file that was written.

    Raises:
        UserError: the stage is not a train stage, has started already, or no candidate could run it.
    """
    graph = load_graph(recipe, overrides, root)
    node = _train_stage(graph, stage)
    directory = graph.stage(node)
    if directory.is_done() or (directory / CHECKPOINTS).exists():
        raise UserError(
            f"{stage}: found a stage that has run already ({directory.path}), expected one that has not started; set "
            "loop settings in the recipe instead"
        )
    run(graph, [n.name for n in node.inputs.values()], lambda *_: None)
    trials: list[Trial] = []
    for candidate in _candidates(node.settings, trials):
        notify(f"trying {describe(candidate)}")
        if trial := _run_candidate(job_of(graph, node, quiet=True), candidate, steps):
            step_ms = trial.step_s * 1e3
            notify(f"  {step_ms:,.0f} ms a step, first step after {trial.start_s:.0f} s, run {trial.total_s:,.0f} s")
            trials.append(trial)
    if not trials:
        raise UserError(f"{stage}: found no candidate that ran; run the stage by itself to see why")
    trials.sort(key=lambda t: t.total_s)
    directory.path.mkdir(parents=True, exist_ok=True)
    atomic_json(directory / EXECUTION_FILE, trials[0].execution)
    return trials, directory / EXECUTION_FILE


def describe(candidate: Candidate) -> str:
    """A candidate as text."""
    return ", ".join(f"{name} {value}" for name, value in candidate.items())


def _train_stage(graph: Graph, stage: str) -> Node:
    names = [n.name for n in graph.nodes.values() if isinstance(n.settings, TrainSettings)]
    if stage not in names:
        raise UserError(f"stage: found {stage!r}, expected a train stage of the recipe: {', '.join(names)}")
    return graph.nodes[stage]


def _candidates(settings: Any, trials: list[Trial]) -> Iterator[Candidate]:
    """PyTorch in fp32, the choice of `auto`, the other backends, then smaller micro-batches and fewer threads.

    A setting of the recipe is never varied, because it takes precedence over `execution.json`.

    Args:
        settings: the stage's settings.
        trials: the trials so far; grows while the generator is consumed.
    """
    assert isinstance(settings, TrainSettings)
    backend = settings.loop.backend
    if settings.precision == "auto":
        yield {"precision": "fp32", "backend": "torch" if backend == "auto" else backend}
    yield {"backend": backend}
    if backend == "auto":
        chosen = trials[-1].execution["backend"] if trials and trials[-1].candidate == {"backend": "auto"} else None
        yield from ({"backend": name} for name in ("torch", "compiled") if name != chosen)
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


def _run_candidate(job: dict[str, Any], candidate: Candidate, steps: int) -> Trial | None:
    """Run the stage with the candidate's settings for `steps` steps; None where it fails."""
    loop = {n: v for n, v in candidate.items() if n != "precision"}
    settings = job["settings"]
    precision = candidate.get("precision", settings["precision"])
    settings = {**settings, "precision": precision, "loop": {**settings["loop"], "log_every": 1, **loop}}
    with tempfile.TemporaryDirectory(prefix="ingot-tune-") as name:
        path = Path(name) / "stage"
        start, start_wall = time.monotonic(), time.time()
        child = start_child({**job, "settings": settings, "dir": str(path), "sinks": []})
        try:
            while child.poll() is None and time.monotonic() - start < TIMEOUT_S:
                if len(_step_events(path)) > steps:
                    break
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        events = _step_events(path)
        if len(events) < 3:
            if child.returncode == 0:
                raise UserError(f"{job['name']}: found {len(events)} steps, expected 3 or more; run it without tuning")
            return None
        planned = read_events(path / METRICS, "plan")[-1]["steps"]
        step_s = statistics.median(e["tokens"] / e["tok_s"] for e in events[1:])
        start_s = events[0]["time"] - start_wall
        execution = json.loads((path / EXECUTION_FILE).read_text())
        return Trial(candidate, step_s, start_s, start_s + (planned - 1) * step_s, execution)


def _step_events(path: Path) -> list[dict[str, Any]]:
    return read_events(path / METRICS, "step") if (path / METRICS).exists() else []
