"""Running a sweep: its points one after the other, each as an ordinary run.

A point that fails does not stop the others: a learning rate that diverges is an answer too. What it failed with is
printed by its stage; a stage that several points share and that has failed is not tried again in the same sweep.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from ingot.core.artifact import StageDir, atomic_json
from ingot.core.errors import StageFailed
from ingot.core.sweep import SWEEP
from ingot.pipeline.graph import Graph
from ingot.pipeline.run import Report, run
from ingot.stages.kind import Node

Announce = Callable[[int, Graph, float | None], None]
"""Called before each point: its number from 1, its graph, the seconds that are left of the sweep if that is known."""
INTERRUPTED = 130
"""Exit code of a stage that the user stopped."""


def run_all(
    graphs: list[Graph],
    only: list[str],
    report: Report,
    announce: Announce = lambda *_: None,
    quiet: bool = False,
) -> dict[str, Path]:
    """Bring a recipe up to date, or every point of its sweep.

    Returns: STAGE -> its directory; in a sweep POINT/STAGE.

    Raises:
        StageFailed: a stage failed; in a sweep, every point that does not need it is done.
        UserError: the run cannot start.
    """
    _record(graphs)
    if graphs[0].recipe.point is None:
        return run(graphs[0], only, report, quiet)
    done: dict[str, Path] = {}
    failed: dict[str, int] = {}  # key of a stage -> its exit code
    without: list[str] = []
    for number, graph in enumerate(graphs, 1):
        announce(number, graph, seconds_left(graphs[number - 1 :], graphs, only))
        if any(node.key in failed for node in graph.needed(only)):
            without.append(label(graph))
            continue
        try:
            made = run(graph, only, report, quiet)
        except StageFailed as error:
            if error.code == INTERRUPTED:
                raise
            failed[next(n.key for n in graph.needed(only) if not graph.stage(n).is_done())] = error.code
            without.append(label(graph))
        else:
            done |= {f"{label(graph)}/{name}": path for name, path in made.items()}
    if failed:
        print(f"not done: {', '.join(without)}; the same command tries again", file=sys.stderr)
        raise StageFailed(max(failed.values()))
    return done


def label(graph: Graph) -> str:
    """The point's name; empty for a recipe without a sweep."""
    return graph.recipe.point.label if graph.recipe.point else ""


def _record(graphs: list[Graph]) -> None:
    """Note in the run's directory which points it has; a recipe without a sweep has none."""
    path = graphs[0].run / SWEEP
    points = [g.recipe.point for g in graphs if g.recipe.point]
    if points:
        atomic_json(path, {"points": [{"label": p.label, "values": dict(p.values)} for p in points]})
    else:
        path.unlink(missing_ok=True)


def seconds_left(to_do: list[Graph], known: list[Graph], only: list[str]) -> float | None:
    """How long the stages that are not done will take, by what stages of their names took at other points.

    Returns: seconds; None where no point has finished a stage of some name.
    """
    took: dict[str, list[float]] = {}
    for node, out in _each(known, only):
        if out.is_done():
            took.setdefault(node.name, []).append(out.done()["seconds"])
    waiting = [node.name for node, out in _each(to_do, only) if not out.is_done()]
    if any(name not in took for name in waiting):
        return None
    return sum(sum(took[name]) / len(took[name]) for name in waiting)


def _each(graphs: list[Graph], only: list[str]) -> list[tuple[Node, StageDir]]:
    """Every stage of the points once."""
    return list({node.key: (node, graph.stage(node)) for graph in graphs for node in graph.needed(only)}.values())
