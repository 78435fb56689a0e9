"""The HTML page of comparisons; a sweep's page also lists its points."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.core.artifact import atomic_write
from ingot.report import figures
from ingot.report.compare import table
from ingot.report.compare.compare import LOSS, Comparison, Entry
from ingot.report.compare.setting import Curve, setting_curve
from ingot.report.html.charts import Point, Series, line_chart, smoothed
from ingot.report.html.conclusions import TONES
from ingot.report.html.rendering import assets, render

MAX_COLUMNS = 7
"""Columns of a table that a page shows without scrolling."""
MAX_COLOURS = 8
"""Entries of a legend. Of more groups the best get entries of their own, and the others share the last one."""


def write_comparison(
    comparisons: list[Comparison],
    to: Path,
    title: str,
    points: Sequence[Mapping[str, Any]] = (),
    law: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of comparisons.

    Args:
        to: file to write.
        title: heading of the page.
        points: points of a sweep: {label, states: [(stage, state)], page: a relative link, or ""}.
        law: a scaling law of a sweep: {chart, sentences}.

    Returns:
        the file written.
    """
    html = render(
        "compare.html",
        title=title,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **assets(),
        points=points,
        law=law,
        sections=[_section(c) for c in comparisons],
    )
    atomic_write(to, str(html))
    return to


def _section(comparison: Comparison) -> dict[str, Any]:
    names, differing = [g.label for g in comparison.trained], table.differing(comparison)
    several = len(comparison.entries) > len(comparison.groups)
    headings, curve = table.headings(comparison), setting_curve(comparison)
    return {
        "id": f"stage-{comparison.stage}",
        "stage": comparison.stage,
        "metric": comparison.metric,
        "results": narrow([headings, *table.rows(comparison)]),
        "per_run": narrow([headings, *table.rows(comparison, per_run=True)]) if several else [],
        "differing": narrow([["setting", *names], *differing]) if differing else [],
        "paired": table.paired(comparison),
        "verdicts": [(TONES[verdict], verdict, sentence) for verdict, sentence in table.bad_verdicts(comparison)],
        "warnings": comparison.warnings,
        "seeds": any(len(g.finished) > 1 for g in comparison.groups),
        "curve": curve and {"chart": _curve_chart(curve), "sentences": curve.sentences},
        "charts": _charts(comparison),
    }


def _curve_chart(curve: Curve) -> Markup:
    """The metric by the swept number, on a logarithmic axis if the numbers span more than a factor of 4."""
    points = [(v.value, v.metric.mean, v.verdict) for v in curve.values]
    series = [Series("mean over seeds", [(x, y) for x, y, _ in points], dots=True)]
    for verdict in ("too low", "best", "too high"):
        marked = [(x, y) for x, y, found in points if found == verdict]
        series += [Series(verdict, [point], dots=True) for point in marked]  # points of their own are not joined
    first, last = points[0][0], points[-1][0]
    name = curve.setting.removeprefix("stage.")
    title = f"{figures.heading(curve.metric)}, by {name}"
    return line_chart(title, series, name, figures.heading(curve.metric), log_x=first > 0 and last > 4 * first)


def narrow(lines: list[list[str]]) -> list[list[str]]:
    """A table, headings first; rows become columns if it is wider than `MAX_COLUMNS` and has fewer rows."""
    if len(lines[0]) <= max(len(lines), MAX_COLUMNS):
        return lines
    return [list(column) for column in zip(*lines, strict=True)]


def _charts(comparison: Comparison) -> list[Markup]:
    """Charts with a curve for each entry, in its group's colour."""
    names, entries = _legend(comparison), {g.label: g.entries for g in comparison.trained}

    def curves(points: Callable[[Entry], list[Point]], smooth: bool = False, dots: bool = False) -> list[Series]:
        series = [(name, points(e)) for label, name in names.items() for e in entries[label]]
        weight = 1 - 1 / min(50, max(1, max((len(p) for _, p in series), default=1) / 50))
        return [Series(name, smoothed(sorted(p), weight) if smooth else p, dots=dots) for name, p in series]

    def steps(field: str) -> Callable[[Entry], list[Point]]:
        return lambda e: [(s["step"], s[field]) for s in e.steps if field in s]

    def losses(e: Entry, first: float = 0, unit: float = 1) -> list[Point]:
        return [(v["step"] * unit, v[LOSS]) for v in e.evaluations if LOSS in v and v["step"] >= first]

    half = max((e.step for e in comparison.entries), default=0) / 2
    batch = {e.facts.get("batch_tokens") for e in comparison.entries if e.trained}
    charts = [
        line_chart("Validation loss", curves(losses, dots=True), "step", "nats per token"),
        line_chart(
            "Validation loss, second half", curves(lambda e: losses(e, half), dots=True), "step", "nats per token"
        ),
    ]
    if len(batch) > 1:  # with different batch sizes, losses at equal steps are not comparable
        by_tokens = curves(lambda e: losses(e, unit=e.facts.get("batch_tokens", 1)), dots=True)
        charts.append(line_chart("Validation loss by tokens", by_tokens, "tokens", "nats per token"))
    return [
        *charts,
        line_chart("Training loss, running mean", curves(steps("loss_nats"), smooth=True), "step", "nats per token"),
        line_chart("Gradient norm, running mean", curves(steps("grad_norm"), smooth=True), "step", "norm"),
        line_chart("Learning rate", curves(steps("lr")), "step", "rate", from_zero=True),
        line_chart("Throughput", curves(steps("tok_s")), "step", "tok/s", from_zero=True),
    ]


def _legend(comparison: Comparison) -> dict[str, str]:
    """Group -> its entry in the legend, in the order of the legend."""
    labels = [g.label for g in comparison.trained]
    means = {g.label: m.mean for g in comparison.trained if (m := g.mean(comparison.metric))}
    best = sorted(labels, key=lambda label: means.get(label, float("inf")))[: MAX_COLOURS - 1]
    if len(labels) <= MAX_COLOURS:
        best = labels
    own, others = [n for n in labels if n in best], [n for n in labels if n not in best]
    return {n: n for n in own} | dict.fromkeys(others, f"{len(others)} others")
