"""Checks of generated answers: pure functions (text, argument) -> bool, by name.

An item names one check, which must pass with any of its targets (`"check": "exact"`), or a table of checks with their
arguments, which must all pass (`"check": {"lines": 3, "lacks": "blue"}`). Such tables express instructions that a
program can verify (IFEval, Zhou et al. 2023, arXiv:2311.07911).
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<!\d)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
"""A number; commas may separate groups of three digits."""


def _number(text: str, argument: Any) -> bool:
    """Whether the last number of the text, the result of a chain of thought, equals `argument`."""
    numbers = _NUMBER.findall(text)
    return bool(numbers) and abs(float(numbers[-1].replace(",", "")) - float(str(argument).replace(",", ""))) < 1e-9


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n") if line.strip()]


def _all(argument: Any) -> list[str]:
    return [argument] if isinstance(argument, str) else list(argument)


def _json(text: str, keys: Any) -> bool:
    """Whether the text is a JSON object with these keys; with `keys` = true, any JSON document."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError):
        return False
    return keys is True or (isinstance(document, dict) and set(keys) <= set(document))


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "exact": lambda text, argument: text.strip() == argument.strip(),
    "starts": lambda text, argument: text.strip().startswith(argument.strip()),
    "ends": lambda text, argument: text.strip().endswith(argument.strip()),
    "contains": lambda text, argument: all(w.lower() in text.lower() for w in _all(argument)),
    "lacks": lambda text, argument: bool(text.strip()) and not any(w.lower() in text.lower() for w in _all(argument)),
    "number": _number,
    "matches": lambda text, argument: re.fullmatch(argument, text.strip(), re.DOTALL) is not None,
    "lines": lambda text, argument: len(_lines(text)) == argument,
    "words": lambda text, argument: len(text.split()) == argument,
    "words_min": lambda text, argument: len(text.split()) >= argument,
    "words_max": lambda text, argument: 0 < len(text.split()) <= argument,
    "bullets": lambda text, argument: sum(line[:2] in ("- ", "* ") for line in _lines(text)) == argument,
    "upper": lambda text, argument: any(map(str.isalpha, text)) and text == text.upper(),
    "lower": lambda text, argument: any(map(str.isalpha, text)) and text == text.lower(),
    "json": _json,
}
"""Name -> check. Only `contains` and `lacks` ignore case."""
COUNTS = ("lines", "words", "words_min", "words_max", "bullets")
"""Checks whose argument is an integer. Targets are strings, so these need a table."""


def is_correct(text: str, check: str | dict[str, Any], targets: Sequence[str]) -> bool:
    """Whether an answer passes a named check with any of the targets, or all checks of a table."""
    if isinstance(check, str):
        return any(CHECKS[check](text, target) for target in targets)
    return all(CHECKS[name](text, argument) for name, argument in check.items())
