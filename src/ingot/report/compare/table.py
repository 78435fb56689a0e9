"""A comparison as rows of text, for the terminal and the page, and as plain data for `--json`."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from ingot.core.errors import shortened
from ingot.core.statistics import Interval
from ingot.report import figures
from ingot.report.compare.compare import BITS, LOSS, Comparison, Group
from ingot.report.terminal import VERDICT_COLOURS, table

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    LOSS: ("validation loss, nats", figures.nats),
    f"best_{LOSS}": ("best on the sample", figures.nats),
    BITS: ("bits per byte", figures.nats),
    "tokens": ("tokens", figures.short),
    "tok_s": ("tok/s", figures.count),
    "seconds": ("time", figures.duration),
    "parameters": ("parameters", figures.short),
}
"""Metric -> (heading, format function), shown if a run has it; losses have intervals."""
MAX_VALUE_CHARACTERS = 60
"""Characters shown of a setting's value."""
MAX_COLUMNS = 12
"""A terminal table with more columns is transposed: runs become columns and metrics become rows."""


def columns(comparison: Comparison) -> dict[str, tuple[str, Callable[[float], str]]]:
    """Metric -> (heading, format function): the comparison's metric, `COLUMNS`, and those of evaluate stages."""
    available = {name for e in comparison.entries for name in e.numbers}
    evaluated = {n: (figures.heading(n), figures.nats) for e in comparison.entries for n in e.evaluated}
    evaluated = {n: c for n, c in evaluated.items() if not n.endswith("/perplexity")}
    by_source = {n: (figures.heading(n), figures.nats) for n in sorted(available) if n.startswith(f"{BITS}/")}
    metric = {comparison.metric: (figures.heading(comparison.metric), figures.value)}
    return {n: c for n, c in (metric | COLUMNS | by_source | evaluated).items() if n in available}


def rows(comparison: Comparison, per_run: bool = False) -> list[list[str]]:
    """Label, seeds and metrics of each group, or of each run with `per_run`."""
    formats = columns(comparison)

    def cell(group: Group, name: str) -> str:
        return _number(group.mean(name), formats[name][1], len(group.having(name)), name == comparison.metric)

    groups = [Group(e.label, [e]) for e in comparison.entries] if per_run else comparison.groups
    return [[g.label, _seeds(g), *(cell(g, name) for name in formats)] for g in groups]


def headings(comparison: Comparison) -> list[str]:
    return ["run", "seeds", *(heading for heading, _ in columns(comparison).values())]


def differing(comparison: Comparison) -> list[list[str]]:
    """Name and values of each setting that differs between groups."""
    return [[name, *map(_value, values)] for name, values in comparison.differing.items()]


def paired(comparison: Comparison) -> list[str]:
    """A sentence for each paired difference."""
    return [
        f"{b.label} - {a.label}: {_signed(i.mean)} ({_signed(i.low)} to {_signed(i.high)}), {i.n} seeds, {_verdict(i)}"
        for a, b, i in comparison.paired
        if i.low is not None and i.high is not None
    ]


def bad_verdicts(comparison: Comparison) -> list[tuple[str, str]]:
    """(verdict, sentence) of each run that got worse or learned nothing."""
    return [
        (e.result["verdict"], f"{e.label}: {e.result['verdict_sentence']}")
        for e in comparison.entries
        if e.result.get("verdict") in VERDICT_COLOURS
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


def _number(mean: Interval | None, form: Callable[[float], str], runs: int, is_metric: bool) -> str:
    if mean is None:
        return "–"
    if mean.low is None or mean.high is None or not (is_metric or form is figures.nats):
        return form(mean.mean)
    if runs == 1:  # a bootstrap interval of an evaluate stage, which is not symmetric
        return f"{form(mean.mean)} ({form(mean.low)} to {form(mean.high)})"
    return f"{form(mean.mean)} ± {form(mean.high - mean.mean)}"


def _value(value: Any) -> str:
    return "–" if value is None else shortened(str(value), MAX_VALUE_CHARACTERS)


def data(comparison: Comparison) -> dict[str, Any]:
    """The complete comparison as plain data."""
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
                "verdict": e.result.get("verdict"),
                "verdict_sentence": e.result.get("verdict_sentence"),
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
            n: dict(zip((g.label for g in comparison.trained), values, strict=True))
            for n, values in comparison.differing.items()
        },
        "paired": [{"from": a.label, "to": b.label, **_interval(i)} for a, b, i in comparison.paired],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def print_comparison(comparison: Comparison, out: Console) -> None:
    """Print a comparison as tables."""
    if comparison.stage:
        out.print(comparison.stage)
    lines = [headings(comparison), *rows(comparison)]
    if len(lines[0]) > max(len(lines), MAX_COLUMNS):
        lines = [list(column) for column in zip(*lines, strict=True)]
    out.print(_filled(*lines))
    if any(len(g.finished) > 1 for g in comparison.groups):
        out.print("± is a 95 % t-interval of the mean over seeds", style="dim")
    if differing(comparison):
        names = [g.label for g in comparison.trained]
        out.print(_filled(["setting", *names], *differing(comparison)))
    for line in paired(comparison):
        out.print(f"{comparison.metric}: {line}", soft_wrap=True)
    for verdict, sentence in bad_verdicts(comparison):
        out.print(sentence, soft_wrap=True, style=VERDICT_COLOURS[verdict])
    for warning in comparison.warnings:
        out.print(f"note: {warning}", soft_wrap=True, style="yellow")


def _filled(names: list[str], *lines: list[str]) -> Table:
    filled = table(*names, right=names[1:] if names[0] == "run" else ())
    for line in lines:
        filled.add_row(*line)
    return filled
