"""Numbers as people read them: one spelling for the terminal and the page.

A number's precision follows its meaning, not its size: losses get four decimals because runs are compared in the
third, counts get separators, durations two units at most.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ingot.core.events import duration as duration

T = TypeVar("T")


def count(value: float) -> str:
    """A whole number with separators: 1115394 -> "1,115,394"."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """A count in three digits: 4213 -> "4.2k", 1115394 -> "1.1M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:g}"


def size(value: float) -> str:
    """Bytes in decimal units: 3200000 -> "3.2 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:,.0f} bytes"


def nats(value: float | None) -> str:
    """A loss or bits per byte: four decimals."""
    return "–" if value is None else f"{value:.4f}"


def meaning(result: Mapping[str, Any]) -> str:
    """What a validation loss comes to: a perplexity, or, of pairs, how many are told apart."""
    right = told_apart(result)
    if right is None:
        return f"perplexity {perplexity(result.get('val_loss_nats'))}"
    return f"{share(right, 1)} of held-out pairs right"


def told_apart(result: Mapping[str, Any]) -> float | None:
    """Share of held-out pairs of which the chosen side is ahead; None where a loss is of tokens, not of pairs."""
    return result.get("val_accuracy", result.get("val_rewards/accuracy"))


def perplexity(loss_nats: float | None) -> str:
    """exp(loss): how many tokens the model hesitates between; one decimal below a thousand."""
    if loss_nats is None or math.isnan(loss_nats):
        return "–"
    value = math.exp(loss_nats) if loss_nats < 700 else math.inf
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def share(part: float, whole: float) -> str:
    """Part of a whole in per cent; "–" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def visible(token: str) -> str:
    """A token with its blanks spelled out: a run of one character as `" " x 64`, else a quoted string."""
    if len(token) > 3 and len(set(token)) == 1:
        return f"{json.dumps(token[0], ensure_ascii=False)} × {len(token)}"
    return json.dumps(token, ensure_ascii=False)


def words(name: str) -> str:
    """A metric's name as a heading: "response_loss_nats" -> "response loss, nats"."""
    stem = name.removesuffix("_nats")
    return stem.replace("_", " ") + (", nats" if stem != name else "")


def value(number: object) -> str:
    """Any scalar of a result: integers with separators, others to six digits, words as they are."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return "–" if number is None else str(number)
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.6g}"


def execution(choices: Mapping[str, Any]) -> str:
    """`execution.json` in one line: "device cpu, precision bf16, threads 2, micro batch 64"."""
    shown = {name: choice for name, choice in choices.items() if name != "reason" and choice not in (False, None, "")}
    return ", ".join(
        f"{name.replace('_', ' ')} {choice}" if choice is not True else name for name, choice in shown.items()
    )


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` items, the first and the last among them, evenly between."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def named(numbers: Mapping[str, Any], words: Mapping[str, tuple[str, Callable[[Any], str]]]) -> list[tuple[str, str]]:
    """Those of the numbers that are there, in words: key -> (name, how it is spelled)."""
    return [(name, spell(numbers[key])) for key, (name, spell) in words.items() if key in numbers]
