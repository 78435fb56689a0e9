"""Output of the commands for runs and sweeps. A sweep lists each shared stage once and compares its points."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.text import Text

from ingot.core.errors import UserError
from ingot.core.recipe import REPORT
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import status
from ingot.pipeline.sweep import label, seconds_left
from ingot.report import figures
from ingot.report.compare.compare import Comparison, compare
from ingot.report.compare.page import write_comparison
from ingot.report.compare.table import print_comparison
from ingot.report.html.page import STATES, write_report
from ingot.report.plan import print_plan
from ingot.report.scaling import chart, scaling_of, sentences
from ingot.report.terminal import console, print_end, state_text, table

Rows = Callable[[Graph], list[dict[str, Any]]]


def sweep_rows(graphs: list[Graph], rows_of: Rows, only: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a run; in a sweep each distinct stage once, with its `point`, named POINT/STAGE.

    A stage that all points share has the point "" and comes first. A stage that only some points share belongs to the
    first of them.

    Args:
        rows_of: `plan_rows` or `status_rows`.
        only: the stages that `rows_of` was given; default: all.
    """
    if graphs[0].recipe.point is None:
        return rows_of(graphs[0])
    keys = [{node.key for node in graph.nodes.values()} for graph in graphs]
    common = set.intersection(*keys) if len(graphs) > 1 else set()
    rows: dict[str, dict[str, Any]] = {}
    for graph in graphs:
        for node, row in zip(graph.needed(only or []), rows_of(graph), strict=True):
            point = "" if node.key in common else label(graph)
            name = f"{point}/{node.name}" if point else node.name
            rows.setdefault(node.key, {"point": point, **row, "name": name})
    return sorted(rows.values(), key=lambda row: row["point"] != "")


def print_any_plan(graphs: list[Graph], rows: list[dict[str, Any]]) -> None:
    """Print the plan of a run; for a sweep, one line for the shared stages and one for each point."""
    if graphs[0].recipe.point is None:
        return print_plan(rows)
    lines: dict[str, Text] = {}
    for row in rows:
        line = lines.setdefault(row["point"], Text())
        line.append("  " if line else "").append(f"{row['name'].rpartition('/')[2]} ").append_text(
            state_text(row["state"])
        )
        if row["state"] in ("RESUME", "FAILED"):
            line.append(f" {row['why']}")
    points = table("point", "stages")
    for point, line in lines.items():
        points.add_row(point or "all", line)
    console().print(points)
    done = sum(all(g.stage(n).is_done() for n in g.nodes.values()) for g in graphs)
    left = seconds_left(graphs, graphs, [])
    estimate = f", about {figures.duration(left)} left" if left else ""
    console().print(f"{done} of {len(graphs)} points are done{estimate}")


def print_any_end(graphs: list[Graph], page: Path) -> None:
    """Print the results of a run, or the comparison of a sweep's points, and the path of the report."""
    if graphs[0].recipe.point is None:
        return print_end(graphs[0], page)
    for comparison in comparisons(graphs):
        print_comparison(comparison, console())
    console().print(f"report  {page}", soft_wrap=True)


def comparisons(graphs: list[Graph]) -> list[Comparison]:
    """The comparisons of a sweep's points; empty before a train stage has started."""
    try:
        return compare([graphs[0].run])
    except UserError:
        return []


def write_any_report(graphs: list[Graph], to: Path | None = None) -> Path:
    """Write the page of a run; for a sweep, the comparison of its points and a page for each point.

    Args:
        to: file to write; default: `report.html` in the run's directory.

    Returns:
        the file written; for a sweep, the comparison.
    """
    if graphs[0].recipe.point is None:
        return write_report(graphs[0], to)
    home = graphs[0].run
    points = []
    for graph in graphs:
        states = [(n.name, STATES[status(graph, n).state]) for n in graph.nodes.values()]
        page = write_report(graph) if (home / label(graph)).is_dir() else None
        link = "" if page is None or to else quote(page.relative_to(home).as_posix())
        points.append({"label": label(graph), "states": states, "page": link})
    title = graphs[0].recipe.run.name
    return write_comparison(comparisons(graphs), to or home / REPORT, title, points, _law(graphs))


def _law(graphs: list[Graph]) -> dict[str, Any] | None:
    """The scaling law of a sweep over sizes and lengths; None if it is none, or too little of it has run."""
    try:
        scaling = scaling_of(graphs)
    except UserError:
        return None
    return {"chart": chart(scaling), "sentences": list(sentences(scaling))}
