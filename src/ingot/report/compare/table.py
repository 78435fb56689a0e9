"""A comparison as rows of words, for the terminal and the page, and as plain data for `--json`."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from ingot.core.errors import shortened
from ingot.core.statistics import Interval
from ingot.report import figures
from ingot.report.compare.compare import BITS, LOSS, Comparison, Group
from ingot.report.terminal import table

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    LOSS: ("validation loss, nats", figures.nats),
    f"best_{LOSS}": ("best", figures.nats),
    BITS: ("bits per byte", figures.nats),
    "tokens": ("tokens", figures.short),
    "tok_s": ("tok/s", figures.count),
    "seconds": ("time", figures.duration),
    "parameters": ("parameters", figures.short),
}
"""Numbers that are shown where a run has them -> heading and spelling; losses come with intervals."""
_SHOWN = 60
"""Characters of a setting's value."""
_ACROSS = 12
"""Columns beyond which the terminal's table shows runs side by side and their numbers below each other."""


def columns(comparison: Comparison) -> dict[str, tuple[str, Callable[[float], str]]]:
    """The numbers of a comparison's table: the metric, the usual ones, those of evaluate stages."""
    have = {name for e in comparison.entries for name in e.numbers}
    judged = {n: (figures.words(n), figures.nats) for e in comparison.entries for n in e.evaluated}
    judged = {n: c for n, c in judged.items() if not n.endswith("/perplexity")}
    by_source = {n: (figures.words(n), figures.nats) for n in sorted(have) if n.startswith(f"{BITS}/")}
    metric = {comparison.metric: (figures.words(comparison.metric), figures.value)}
    return {n: c for n, c in (metric | COLUMNS | by_source | judged).items() if n in have}


def rows(comparison: Comparison, apart: bool = False) -> list[list[str]]:
    """A row for each group (or for each run, `apart`): its name, its seeds, its numbers."""
    shown = columns(comparison)

    def cell(group: Group, name: str) -> str:
        return _number(group.mean(name), shown[name][1], len(group.having(name)), name == comparison.metric)

    groups = [Group(e.label, [e]) for e in comparison.entries] if apart else comparison.groups
    return [[g.label, _seeds(g), *(cell(g, name) for name in shown)] for g in groups]


def headings(comparison: Comparison) -> list[str]:
    return ["run", "seeds", *(heading for heading, _ in columns(comparison).values())]


def differing(comparison: Comparison) -> list[list[str]]:
    """A row for each setting that is not the same in all groups: its name, its values."""
    return [[name, *map(_value, values)] for name, values in comparison.differing.items()]


def paired(comparison: Comparison) -> list[str]:
    """A sentence for each paired difference."""
    return [
        f"{b.label} - {a.label}: {_signed(i.mean)} ({_signed(i.low)} to {_signed(i.high)}), {i.n} seeds, {_verdict(i)}"
        for a, b, i in comparison.paired
        if i.low is not None and i.high is not None
    ]


def _signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) < 100 else f"{value:+,.0f}"


def _verdict(interval: Interval) -> str:
    assert interval.low is not None
    assert interval.high is not None
    return "could be chance" if interval.low <= 0 <= interval.high else "more than chance"


def _seeds(group: Group) -> str:
    seeds = ["+".join(map(str, e.seeds)) for e in group.finished or group.entries]
    return ", ".join(seeds) if len(seeds) <= 5 else f"{len(seeds)} seeds"


def _number(mean: Interval | None, spell: Callable[[float], str], runs: int, is_metric: bool) -> str:
    if mean is None:
        return "–"
    if mean.low is None or mean.high is None or not (is_metric or spell is figures.nats):
        return spell(mean.mean)
    if runs == 1:  # an evaluate stage's interval over documents, which has no one half
        return f"{spell(mean.mean)} ({spell(mean.low)} to {spell(mean.high)})"
    return f"{spell(mean.mean)} ± {spell(mean.high - mean.mean)}"


def _value(value: Any) -> str:
    return "–" if value is None else shortened(str(value), _SHOWN)


def data(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain data."""
    names = list(columns(comparison))
    return {
        "stage": comparison.stage,
        "metric": comparison.metric,
        "warnings": comparison.warnings,
        "runs": [
            {
                "label": e.label,
                "directory": str(e.path),
                "group": g.label,
                "seeds": list(e.seeds),
                "finished": e.finished,
                "step": e.step,
                "steps": e.facts.get("steps"),
                "numbers": e.numbers,
                "intervals": {n: [r["low"], r["high"]] for n, r in e.evaluated.items()},
            }
            for g in comparison.groups
            for e in g.entries
        ],
        "groups": [
            {"label": g.label, "n": len(g.finished)} | {n: _interval(i) for n in names if (i := g.mean(n))}
            for g in comparison.groups
        ],
        "differing": {
            n: dict(zip((g.label for g in comparison.groups), values, strict=True))
            for n, values in comparison.differing.items()
        },
        "paired": [{"from": a.label, "to": b.label, **_interval(i)} for a, b, i in comparison.paired],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def print_comparison(comparison: Comparison, out: Console) -> None:
    """The comparison as tables."""
    if comparison.stage:
        out.print(comparison.stage)
    found = [headings(comparison), *rows(comparison)]
    if len(found[0]) > max(len(found), _ACROSS):
        found = [list(column) for column in zip(*found, strict=True)]
    out.print(_filled(*found))
    if any(len(g.finished) > 1 for g in comparison.groups):
        out.print("± is a 95 % t-interval of the mean over seeds", style="dim")
    if differing(comparison):
        names = [g.label for g in comparison.groups]
        out.print(_filled(["setting", *names], *differing(comparison)))
    for line in paired(comparison):
        out.print(f"{comparison.metric}: {line}", soft_wrap=True)
    for warning in comparison.warnings:
        out.print(f"note: {warning}", soft_wrap=True, style="yellow")


def _filled(names: list[str], *lines: list[str]) -> Table:
    shown = table(*names, right=names[1:] if names[0] == "run" else ())
    for line in lines:
        shown.add_row(*line)
    return shown
