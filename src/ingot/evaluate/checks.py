"""Is an answer right? Rules over text, each a pure function (text, argument) -> bool, by name.

An item names one rule for any of its targets (`"check": "exact"`), or a table of rules with their arguments of which
all must hold (`"check": {"lines": 3, "lacks": "blue"}`): instructions whose following can be verified by a program, an
idea of Zhou et al. 2023 (IFEval, arXiv:2311.07911).
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<!\d)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
"""Commas stand between groups of three digits."""


def _number(text: str, wanted: Any) -> bool:
    """The last number in the text: what a chain of thought ends in."""
    found = _NUMBER.findall(text)
    return bool(found) and abs(float(found[-1].replace(",", "")) - float(str(wanted).replace(",", ""))) < 1e-9


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n") if line.strip()]


def _all(wanted: Any) -> list[str]:
    return [wanted] if isinstance(wanted, str) else list(wanted)


def _json(text: str, keys: Any) -> bool:
    """A JSON document; of an object, with these keys (true: any document)."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return keys is True or (isinstance(found, dict) and set(keys) <= set(found))


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "exact": lambda text, wanted: text.strip() == wanted.strip(),
    "starts": lambda text, wanted: text.strip().startswith(wanted.strip()),
    "ends": lambda text, wanted: text.strip().endswith(wanted.strip()),
    "contains": lambda text, wanted: all(w.lower() in text.lower() for w in _all(wanted)),
    "lacks": lambda text, wanted: bool(text.strip()) and not any(w.lower() in text.lower() for w in _all(wanted)),
    "number": _number,
    "matches": lambda text, wanted: re.fullmatch(wanted, text.strip(), re.DOTALL) is not None,
    "lines": lambda text, wanted: len(_lines(text)) == wanted,
    "words": lambda text, wanted: len(text.split()) == wanted,
    "words_min": lambda text, wanted: len(text.split()) >= wanted,
    "words_max": lambda text, wanted: 0 < len(text.split()) <= wanted,
    "bullets": lambda text, wanted: sum(line[:2] in ("- ", "* ") for line in _lines(text)) == wanted,
    "upper": lambda text, wanted: any(map(str.isalpha, text)) and text == text.upper(),
    "lower": lambda text, wanted: any(map(str.isalpha, text)) and text == text.lower(),
    "json": _json,
}
"""Rule -> whether a text obeys it. Only `contains` and `lacks` look past capitals."""
COUNTS = ("lines", "words", "words_min", "words_max", "bullets")
"""Rules whose argument is a number, which no target is."""


def right(text: str, check: str | dict[str, Any], targets: Sequence[str]) -> bool:
    """Whether an answer obeys a check: a named one for any of the targets, or all of a table."""
    if isinstance(check, str):
        return any(CHECKS[check](text, target) for target in targets)
    return all(CHECKS[name](text, wanted) for name, wanted in check.items())
