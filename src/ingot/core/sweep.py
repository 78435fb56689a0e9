"""`[sweep]` in a recipe: lists of values for some settings, expanded to a grid of points.

A point is the recipe with one value of each list. Seeds vary fastest, so points that differ only in the seed are
adjacent. Every point is an ordinary recipe: a stage that does not depend on a swept setting has the same key in all
points and runs once, and a killed sweep resumes like any other run.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.artifact import digest_bytes
from ingot.core.errors import UserError, nearest

SWEEP = "sweep.json"
"""File in the directory of a swept run that lists its points."""
SEED = "run.seed"
_MAX_VALUE_LENGTH, _MAX_LABEL_LENGTH = 24, 120
"""Most characters of a value, and of a label, which is the name of a directory."""


@dataclass(frozen=True)
class Point:
    """One combination of a sweep's values."""

    label: str
    """Name of the point's directory, unique in its sweep: `lr=0.001,seed=1`."""
    values: Mapping[str, Any]
    """Full name of a setting -> its value."""


def points(sweep: Any, recipe: Mapping[str, Any]) -> list[Point]:
    """All combinations of a `[sweep]` table, in order.

    Args:
        sweep: the table: `seeds` and full names of settings, each with a list of values.
        recipe: the recipe without that table.

    Raises:
        UserError: all errors of the table.
    """
    axes, errors = dict(_axes(sweep)), []
    for name, values in axes.items():
        errors += [f"sweep.{name}: {problem}" for problem in _problems(name, values, recipe)]
    if not axes:
        errors.append("sweep: found no setting; add one such as seeds = [1, 2, 3]")
    if "seeds" in axes and SEED in axes:
        errors.append(f"sweep: found both seeds and {SEED}, which are the same setting; keep one")
    if errors:
        raise UserError("\n".join(errors))
    if "seeds" in axes:
        axes[SEED] = axes.pop("seeds")  # itertools.product varies the last axis fastest
    names = short_names(axes)
    combinations = []
    for values in itertools.product(*axes.values()):
        label = ",".join(f"{names[name]}={value_label(value)}" for name, value in zip(axes, values, strict=True))
        combinations.append(Point(_shorten(label, _MAX_LABEL_LENGTH), dict(zip(axes, values, strict=True))))
    return combinations


def with_values(recipe: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's table with some settings changed, by their full names."""
    out = dict(recipe)
    for name, value in values.items():
        *parents, leaf = name.split(".")
        table = out
        for parent in parents:
            inner = table.get(parent, {})
            if not isinstance(inner, Mapping):
                raise UserError(f"sweep.{name}: {parent} is not a table, so it has no setting {leaf}")
            table[parent] = table = dict(inner)
        table[leaf] = value
    return out


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Full name -> its shortest unique suffix of dotted parts: stage.base.optim.lr -> lr."""
    suffixes = {n: [".".join(n.split(".")[-i:]) for i in range(1, n.count(".") + 2)] for n in names}
    counts = Counter(suffix for own in suffixes.values() for suffix in own)
    return {name: next((s for s in own if counts[s] == 1), name) for name, own in suffixes.items()}


def value_label(value: Any) -> str:
    """A value as part of a file name. A value that is long or has other characters is cut and gets a digest."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    safe = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.")
    if safe == text:
        return _shorten(text, _MAX_VALUE_LENGTH)
    return f"{safe[: _MAX_VALUE_LENGTH - 7]}~{digest_bytes(text.encode())[:6]}"


def _shorten(text: str, limit: int) -> str:
    """The text with at most `limit` characters; a cut text ends in a digest, which keeps it unique."""
    return text if len(text) <= limit else f"{text[: limit - 7]}~{digest_bytes(text.encode())[:6]}"


def _axes(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and their lists. In TOML `stage.base.optim.lr = [...]` without quotes is a table of tables."""
    if not isinstance(table, Mapping):
        raise UserError(f"sweep: found {table!r}, expected a table such as [sweep] with seeds = [1, 2, 3]")
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _problems(name: str, values: Any, recipe: Mapping[str, Any]) -> Iterator[str]:
    """Errors of one axis. Whether the stage has such a setting is checked when a point is read."""
    head, *rest = name.split(".")
    stages = recipe.get("stage", {})
    if name == "run.name":
        yield "the name of the run cannot vary, because its directory contains the points; leave it out"
    elif not rest and name != "seeds":
        yield f"unknown setting; {nearest(name, ['seeds', SEED, *(f'stage.{s}.SETTING' for s in stages)])}"
    elif rest and head not in ("run", "stage"):
        yield f"unknown setting; {nearest(head, ['run', 'stage'])}"
    elif head == "stage" and rest[0] not in stages:
        yield f"no stage '{rest[0]}'; {nearest(rest[0], stages)}"
    elif head == "stage" and len(rest) < 2:
        yield "found a stage, expected one of its settings"
    if not isinstance(values, list):
        yield f"found {values!r}, expected a list such as [{json.dumps(values, default=str)}]"
    elif not values:
        yield "found an empty list, expected at least one value"
    elif len({value_label(v) for v in values}) < len(values):
        yield f"found {values!r}, expected each value once"
