"""Runs a sweep: its points one after another, each as an ordinary run.

A point that fails does not stop the others, because a diverging learning rate is a result too. A failed stage that
several points have in common is not tried again in the same sweep.
"""

from collections.abc import Callable
from pathlib import Path

from ingot.core.artifact import StageDir, atomic_json
from ingot.core.errors import StageFailed, print_message
from ingot.core.sweep import SWEEP
from ingot.pipeline.graph import Graph
from ingot.pipeline.run import Report, run
from ingot.pipeline.runs import write_record
from ingot.stages.kind import Node

Announce = Callable[[int, Graph, float | None], None]
"""announce(number, graph, seconds): called before each point with its number from 1, its graph, and the estimated rest
of the sweep in seconds (None if unknown)."""
INTERRUPTED = 130
"""Exit code of a stage that the user interrupted."""


def run_all(
    graphs: list[Graph],
    only: list[str],
    report: Report,
    announce: Announce = lambda *_: None,
    quiet: bool = False,
    nproc: int | None = None,
) -> dict[str, Path]:
    """Run a recipe, or every point of its sweep.

    Returns:
        STAGE -> its directory; in a sweep POINT/STAGE -> directory.

    Raises:
        StageFailed: a stage failed; in a sweep, after all points that do not need it have run.
        UserError: the run cannot start.
    """
    _write_points(graphs)
    write_record(graphs, only)
    if graphs[0].recipe.point is None:
        return run(graphs[0], only, report, quiet, nproc)
    done: dict[str, Path] = {}
    failed: dict[str, int] = {}  # key of a stage -> its exit code
    skipped: list[str] = []
    for number, graph in enumerate(graphs, 1):
        announce(number, graph, seconds_left(graphs[number - 1 :], graphs, only))
        if any(node.key in failed for node in graph.needed(only)):
            skipped.append(label(graph))
            continue
        try:
            directories = run(graph, only, report, quiet, nproc)
        except StageFailed as error:
            if error.code == INTERRUPTED:
                raise
            failed[next(n.key for n in graph.needed(only) if not graph.stage(n).is_done())] = error.code
            skipped.append(label(graph))
        else:
            done |= {f"{label(graph)}/{name}": path for name, path in directories.items()}
    if failed:
        print_message(f"not done: {', '.join(skipped)}; the same command tries again")
        raise StageFailed(max(failed.values()))
    return done


def label(graph: Graph) -> str:
    """The point's name; empty for a recipe without a sweep."""
    return graph.recipe.point.label if graph.recipe.point else ""


def _write_points(graphs: list[Graph]) -> None:
    """List the points of a sweep in the run's directory; remove the list where the recipe has no sweep."""
    path = graphs[0].run / SWEEP
    points = [g.recipe.point for g in graphs if g.recipe.point]
    if points:
        atomic_json(path, {"points": [{"label": p.label, "values": dict(p.values)} for p in points]})
    else:
        path.unlink(missing_ok=True)


def seconds_left(remaining: list[Graph], graphs: list[Graph], only: list[str]) -> float | None:
    """Estimate the time of the unfinished stages, from the times of stages of the same name at other points.

    Args:
        remaining: the points to estimate.
        graphs: all points of the sweep.
        only: names of the stages to run; empty for all.

    Returns:
        Seconds; None where some stage has not finished at any point.
    """
    seconds: dict[str, list[float]] = {}
    for node, out in _distinct_stages(graphs, only):
        if out.is_done():
            seconds.setdefault(node.name, []).append(out.read_done()["seconds"])
    unfinished = [node.name for node, out in _distinct_stages(remaining, only) if not out.is_done()]
    if any(name not in seconds for name in unfinished):
        return None
    return sum(sum(seconds[name]) / len(seconds[name]) for name in unfinished)


def _distinct_stages(graphs: list[Graph], only: list[str]) -> list[tuple[Node, StageDir]]:
    """Every stage of the points, once for each key."""
    return list({node.key: (node, graph.stage(node)) for graph in graphs for node in graph.needed(only)}.values())
