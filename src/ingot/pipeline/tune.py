"""`ingot tune`: finds the fastest execution settings of a train stage on this machine, within a minute.

Each measurement runs the stage itself with other execution settings, in a process of its own and a temporary directory,
and is stopped after some steps. First every candidate is measured once, then the fastest and the default in turns. Only
if the fastest wins by more than the repetitions differ, its `execution.json` is copied to the stage's directory, where
the next `ingot run` finds it. Settings in the recipe take precedence.

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

BUDGET_S = 60.0
"""Seconds of all measurements: at most half of them until every candidate was measured once, the rest for turns."""
MAX_REPETITIONS = 4
"""Measurements of the default and of the fastest candidate that are enough to decide."""
MIN_STEPS = 3
"""Steps that a measurement needs: the first may compile."""
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


@dataclass(frozen=True)
class Decision:
    """The outcome of all measurements."""

    trials: list[Trial]
    """In the order in which they ran; the first is the default."""
    winner: Trial | None
    """None: the default stays."""
    reason: str


Measure = Callable[[Candidate, float], Trial | None]
"""(candidate, most seconds) -> its measurement; None if it failed or took longer."""


def tune(
    recipe: Path, overrides: list[str], stage: str, root: Path, steps: int, notify: Callable[[str], None]
) -> tuple[Decision, Path | None]:
    """Measure candidates on a train stage, and write the settings of the fastest if it beats the default.

    Args:
        recipe: the recipe.
        overrides: `--set` strings.
        stage: name of the train stage.
        root: output root.
        steps: most steps of a measurement.
        notify: receives progress lines.

    Returns:
        The decision, and the file that was written; None if the default stays.

    Raises:
        UserError: the stage is not a train stage, has started already, or the default could not be measured.
    """
    graph = load_graph(recipe, overrides, root)
    node = train_stage(graph, stage)
    directory = graph.stage(node)
    if directory.is_done() or (directory / CHECKPOINTS).exists():
        raise UserError(
            f"{stage}: found a stage that has run already ({directory.path}), expected one that has not started; set "
            "loop settings in the recipe instead"
        )
    run(graph, [n.name for n in node.inputs.values()], lambda *_: None)

    def measure(candidate: Candidate, seconds: float) -> Trial | None:
        return run_candidate(job_of(graph, node, quiet=True), candidate, steps, seconds)

    trials: list[Trial] = []
    decision = decide(stage, _candidates(node.settings, trials), trials, measure, notify)
    if decision.winner is None:
        return decision, None
    directory.path.mkdir(parents=True, exist_ok=True)
    atomic_json(directory / EXECUTION_FILE, decision.winner.execution)
    return decision, directory / EXECUTION_FILE


def decide(
    stage: str,
    candidates: Iterator[Candidate],
    trials: list[Trial],
    measure: Measure,
    notify: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Decision:
    """Measure every candidate once, then the default and the fastest in turns, and compare them.

    Args:
        stage: name of the stage, for messages.
        candidates: the default first.
        trials: receives the measurements.
        measure: measures a candidate.
        notify: receives progress lines.
        clock: seconds.

    Raises:
        UserError: the default could not be measured in half of the budget.
    """
    start, costs = clock(), dict[str, float]()

    def run_once(candidate: Candidate, until: float) -> Trial | None:
        name, began = describe(candidate), clock()
        notify(f"measuring {name}")
        trial = measure(candidate, until - began)
        costs[name] = clock() - began
        if trial is None:
            notify(f"  failed, or fewer than {MIN_STEPS} steps in {costs[name]:.0f} s")
        else:
            notify(f"  {trial.step_s * 1e3:,.0f} ms a step, first step after {trial.start_s:.1f} s")
            trials.append(trial)
        return trial

    middle, end = start + BUDGET_S / 2, start + BUDGET_S
    for candidate in candidates:
        if clock() >= middle:
            break
        if run_once(candidate, middle) is None and not trials:
            raise UserError(
                f"{stage}: found fewer than {MIN_STEPS} steps in {clock() - start:.0f} s with the default settings, so "
                "there is nothing to compare; run the stage without tuning"
            )
    default, fastest = trials[0].candidate, min(trials, key=lambda t: t.total_s).candidate
    if fastest == default:
        return Decision(trials, None, f"the default is the fastest of {len(trials)} candidates and stays")
    while sum(t.candidate == fastest for t in trials) < MAX_REPETITIONS:
        if clock() + costs[describe(default)] + costs[describe(fastest)] > end:
            break
        for candidate in (default, fastest):
            run_once(candidate, end)
    return _compare(trials, default, fastest)


def _compare(trials: list[Trial], default: Candidate, fastest: Candidate) -> Decision:
    """Whether the fastest candidate beats the default by more than repetitions of one of them differ."""
    seconds = {
        name: _run_seconds([t for t in trials if t.candidate == c]) for name, c in (("a", default), ("b", fastest))
    }
    a, b = seconds["a"], seconds["b"]
    name = describe(fastest)
    if min(len(a), len(b)) < 2:
        return Decision(trials, None, f"{name} could not be measured twice in {BUDGET_S:.0f} s; the default stays")
    gain = statistics.mean(a) - statistics.mean(b)
    spread = max(max(a) - min(a), max(b) - min(b))
    percent = f"{100 * gain / statistics.mean(a):.0f} %"
    if gain <= spread:
        return Decision(
            trials,
            None,
            f"{name} takes {percent} less time than the default, but repetitions of one setting differ by "
            f"{100 * spread / statistics.mean(a):.0f} %, so the machine is too busy to tell; the default stays",
        )
    winner = min((t for t in trials if t.candidate == fastest), key=lambda t: t.total_s)
    return Decision(trials, winner, f"{name} takes {percent} less time than the default")


def _run_seconds(repetitions: list[Trial]) -> list[float]:
    """Seconds of the complete run by each measurement. Later starts find compiled code, as the run itself will."""
    start_s = min(t.start_s for t in repetitions)
    return [t.total_s - t.start_s + start_s for t in repetitions]


def describe(candidate: Candidate) -> str:
    """A candidate as text."""
    return ", ".join(f"{name} {value}" for name, value in candidate.items())


def train_stage(graph: Graph, stage: str) -> Node:
    """The train stage of that name.

    Raises:
        UserError: the recipe has none.
    """
    names = [n.name for n in graph.nodes.values() if isinstance(n.settings, TrainSettings)]
    if stage not in names:
        raise UserError(f"stage: found {stage!r}, expected a train stage of the recipe: {', '.join(names)}")
    return graph.nodes[stage]


def _candidates(settings: Any, trials: list[Trial]) -> Iterator[Candidate]:
    """The default, the other backends, PyTorch in fp32, then smaller micro-batches and fewer threads.

    A setting of the recipe is never varied, because it takes precedence over `execution.json`.

    Args:
        settings: the stage's settings.
        trials: the trials so far; grows while the generator is consumed.
    """
    assert isinstance(settings, TrainSettings)
    backend = settings.loop.backend
    yield {"backend": backend}
    if not trials:
        return
    default = trials[0].execution
    if backend == "auto":
        yield from ({"backend": name} for name in ("torch", "compiled") if name != default["backend"])
    if settings.precision == "auto" and default["precision"] != "fp32":
        yield {"precision": "fp32", "backend": "torch" if backend == "auto" else backend}
    best = min(trials, key=lambda t: t.total_s)
    rows = int(best.execution["micro_batch"])
    if settings.loop.micro_batch is None:
        for fewer in (rows // 2, rows // 4):
            if fewer:
                yield {**best.candidate, "micro_batch": fewer}
    threads = int(best.execution["threads"])
    if settings.loop.threads is None and threads > 1:
        yield {**best.candidate, "threads": threads // 2}


def run_candidate(job: dict[str, Any], candidate: Candidate, steps: int, seconds: float) -> Trial | None:
    """Run the stage with the candidate's settings for `steps` steps; None if it fails or takes too many seconds."""
    loop = {n: v for n, v in candidate.items() if n != "precision"}
    settings = job["settings"]
    precision = candidate.get("precision", settings["precision"])
    settings = {**settings, "precision": precision, "loop": {**settings["loop"], "log_every": 1, **loop}}
    with tempfile.TemporaryDirectory(prefix="ingot-tune-") as name:
        path = Path(name) / "stage"
        start, start_wall = time.monotonic(), time.time()
        child = start_child({**job, "settings": settings, "dir": str(path), "sinks": []})
        try:
            while child.poll() is None and time.monotonic() - start < seconds:
                if len(_step_events(path)) > steps:
                    break
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        events = _step_events(path)
        if len(events) < MIN_STEPS:
            if child.returncode == 0:
                raise UserError(
                    f"{job['name']}: found {len(events)} steps, expected {MIN_STEPS} or more; run it without tuning"
                )
            return None
        planned = read_events(path / METRICS, "plan")[-1]["steps"]
        step_s = statistics.median(e["tokens"] / e["tok_s"] for e in events[1:])
        start_s = events[0]["time"] - start_wall
        execution = json.loads((path / EXECUTION_FILE).read_text())
        return Trial(candidate, step_s, start_s, start_s + (planned - 1) * step_s, execution)


def _step_events(path: Path) -> list[dict[str, Any]]:
    return read_events(path / METRICS, "step") if (path / METRICS).exists() else []
