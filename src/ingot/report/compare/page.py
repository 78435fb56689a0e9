"""A comparison as one HTML file, and the report of a sweep, which is a comparison with its points."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.core.artifact import atomic_write
from ingot.report.compare import table as words
from ingot.report.compare.compare import LOSS, Comparison, Entry
from ingot.report.html.charts import Point, Series, line_chart, smoothed
from ingot.report.html.rendering import render

COLOURS = 8
"""Names in a legend; of more groups the best are drawn by name and the rest together."""


def write_comparison(made: list[Comparison], to: Path, title: str, points: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write the page.

    Args:
        made: what is compared.
        to: file to write.
        title: heading.
        points: of a sweep: {label, states, page}.
    """
    html = render(
        "compare.html",
        title=title,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        style=Markup(files("ingot.report").joinpath("templates/style.css").read_text()),
        points=points,
        sections=[_section(c) for c in made],
    )
    atomic_write(to, str(html))
    return to


def _section(comparison: Comparison) -> dict[str, Any]:
    return {
        "stage": comparison.stage,
        "metric": comparison.metric,
        "headings": words.headings(comparison),
        "rows": words.rows(comparison),
        "apart": words.rows(comparison, apart=True) if len(comparison.entries) > len(comparison.groups) else [],
        "names": [g.label for g in comparison.groups],
        "differing": words.differing(comparison),
        "paired": words.paired(comparison),
        "warnings": comparison.warnings,
        "seeds": any(len(g.finished) > 1 for g in comparison.groups),
        "charts": _charts(comparison),
    }


def _charts(comparison: Comparison) -> list[Markup]:
    """The curves of all entries, each in its group's colour."""
    names, entries = _legend(comparison), {g.label: g.entries for g in comparison.groups}

    def curves(points: Callable[[Entry], list[Point]], smooth: bool = False, dots: bool = False) -> list[Series]:
        drawn = [(name, points(e)) for label, name in names.items() for e in entries[label]]
        weight = 1 - 1 / min(50, max(1, max((len(p) for _, p in drawn), default=1) / 50))
        return [Series(name, smoothed(sorted(p), weight) if smooth else p, dots=dots) for name, p in drawn]

    def steps(field: str) -> Callable[[Entry], list[Point]]:
        return lambda e: [(s["step"], s[field]) for s in e.steps if field in s]

    def losses(e: Entry, first: float = 0, unit: float = 1) -> list[Point]:
        return [(v["step"] * unit, v[LOSS]) for v in e.evaluations if LOSS in v and v["step"] >= first]

    half = max((e.step for e in comparison.entries), default=0) / 2
    batch = {e.facts.get("batch_tokens") for e in comparison.entries}
    charts = [
        line_chart("Validation loss", curves(losses, dots=True), "step", "nats per token"),
        line_chart(
            "Validation loss, second half", curves(lambda e: losses(e, half), dots=True), "step", "nats per token"
        ),
    ]
    if len(batch) > 1:  # a step is not the same amount of text in all of them
        by_tokens = curves(lambda e: losses(e, unit=e.facts.get("batch_tokens", 1)), dots=True)
        charts.append(line_chart("Validation loss by tokens", by_tokens, "tokens", "nats per token"))
    return [
        *charts,
        line_chart("Training loss, running mean", curves(steps("loss_nats"), smooth=True), "step", "nats per token"),
        line_chart("Gradient norm, running mean", curves(steps("grad_norm"), smooth=True), "step", "norm"),
        line_chart("Learning rate", curves(steps("lr")), "step", "rate", from_zero=True),
        line_chart("Throughput", curves(steps("tok_s")), "step", "tokens per second", from_zero=True),
    ]


def _legend(comparison: Comparison) -> dict[str, str]:
    """Group -> name of its curves, in the order of the legend: its own, or one for all that find no colour left."""
    labels = [g.label for g in comparison.groups]
    means = {g.label: m.mean for g in comparison.groups if (m := g.mean(comparison.metric))}
    best = sorted(labels, key=lambda label: means.get(label, float("inf")))[: COLOURS - 1]
    if len(labels) <= COLOURS:
        best = labels
    named, rest = [n for n in labels if n in best], [n for n in labels if n not in best]
    return {n: n for n in named} | dict.fromkeys(rest, f"{len(rest)} others")
