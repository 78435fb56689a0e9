"""Formatting of numbers for the terminal and the page.

The precision follows the kind of number: losses have four decimals, because runs differ in the third; counts have
separators; durations have at most two units.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ingot.core.events import duration as duration
from ingot.core.events import size as size

T = TypeVar("T")


def count(value: float) -> str:
    """An integer with separators: 1115394 -> "1,115,394"."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """A count with one decimal and a unit: 4213 -> "4.2k", 1115394 -> "1.1M"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + unit
    return f"{value:g}"


def mfu_line(mfu: float, peak: Mapping[str, Any]) -> str:
    """The fraction of the peak that training reaches, and which peak.

    Args:
        mfu: the fraction.
        peak: `peak_flops`, and `peak_by` that it is known.
    """
    of = "its data sheet" if peak["peak_by"] == "data sheet" else "the fastest matrix product measured"
    return f"{mfu:.0%} of {peak['peak_flops'] / 1e9:,.0f} GFLOP/s, {of} (MFU)"


def nats(value: float | None) -> str:
    """A loss or bits per byte, with four decimals."""
    return "–" if value is None else f"{value:.4f}"


def describe_loss(result: Mapping[str, Any]) -> str:
    """A validation loss in other terms: the perplexity, or the accuracy if the loss is over pairs."""
    accuracy = pair_accuracy(result)
    if accuracy is None:
        return f"perplexity {perplexity(result.get('val_loss_nats'))}"
    return f"{percentage(accuracy, 1)} of held-out pairs right"


def pair_accuracy(result: Mapping[str, Any]) -> float | None:
    """Fraction of held-out pairs whose chosen answer scores higher; None if the loss is over tokens."""
    return result.get("val_accuracy", result.get("val_rewards/accuracy"))


def perplexity(loss_nats: float | None) -> str:
    """exp(loss), with one decimal below a thousand."""
    if loss_nats is None or math.isnan(loss_nats):
        return "–"
    value = math.exp(loss_nats) if loss_nats < 700 else math.inf
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percentage(part: float, total: float) -> str:
    """part / total in per cent; "–" if total is 0."""
    return f"{100 * part / total:.1f} %" if total else "–"


def visible(token: str) -> str:
    """A token as a quoted string, so that its spaces show; a run of one character as `" " × 64`."""
    if len(token) > 3 and len(set(token)) == 1:
        return f"{json.dumps(token[0], ensure_ascii=False)} × {len(token)}"
    return json.dumps(token, ensure_ascii=False)


def heading(name: str) -> str:
    """A metric's name as a heading: "response_loss_nats" -> "response loss, nats"."""
    stem = name.removesuffix("_nats")
    return stem.replace("_", " ") + (", nats" if stem != name else "")


def value(number: object) -> str:
    """Any scalar of a result: integers with separators, other numbers with six digits, strings unchanged."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return "–" if number is None else str(number)
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.6g}"


def execution(choices: Mapping[str, Any]) -> str:
    """`execution.json` in one line: "device cpu, precision bf16, threads 2, micro batch 64"."""
    active = {name: choice for name, choice in choices.items() if name != "reason" and choice not in (False, None, "")}
    return ", ".join(
        f"{name.replace('_', ' ')} {choice}" if choice is not True else name for name, choice in active.items()
    )


def accuracies(rows: Sequence[Mapping[str, Any]]) -> str:
    """Models with their accuracy and its change, such as "chat 84.0 % (+84.0)"; the rows are `reading.accuracies`'."""
    changes = ["" if row["gain"] is None else f" ({100 * row['gain']:+.1f})" for row in rows]
    return ", ".join(f"{row['model']} {100 * row['value']:.1f} %{c}" for row, c in zip(rows, changes, strict=True))


def evenly_spaced(items: Sequence[T], max_items: int) -> Sequence[T]:
    """At most `max_items` items at even distances, including the first and the last."""
    if len(items) <= max_items:
        return items
    return [items[round(i * (len(items) - 1) / (max_items - 1))] for i in range(max_items)]


Formats = Mapping[str, tuple[str, Callable[[Any], str]]]
"""Key of a result -> (label, format function)."""


def labelled(numbers: Mapping[str, Any], formats: Formats) -> list[tuple[str, str]]:
    """(label, formatted number) of every key of `formats` that `numbers` has."""
    return [(label, form(numbers[key])) for key, (label, form) in formats.items() if key in numbers]
