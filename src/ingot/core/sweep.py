"""`[sweep]` in a recipe: lists of values for some settings, unrolled into points.

A point is the recipe with one value of each list; seeds vary fastest, so points that differ in nothing else stand side
by side. Points are ordinary recipes: stages that no swept setting reaches have the same key in all of them and run
once, and a killed sweep goes on like any other run.

Rejected: random and adaptive search (a grid is what a comparison with intervals needs, and it can be read).
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
"""File in the directory of a swept run: its points and their values."""
SEED = "run.seed"
_VALUE, _LABEL = 24, 120
"""Longest spelling of a value, and of a whole label: a label is the name of a directory."""


@dataclass(frozen=True)
class Point:
    """One combination of a sweep's values."""

    label: str
    """Name of its directory: `lr=0.001,seed=1`; unique in its sweep."""
    values: Mapping[str, Any]
    """Whole name of a setting -> its value here."""


def points(sweep: Any, recipe: Mapping[str, Any]) -> list[Point]:
    """All combinations of a `[sweep]` table, in order.

    Args:
        sweep: the table: `seeds`, and whole names of settings, each with a list of values.
        recipe: the rest of the recipe, whose stages a name must know.

    Raises:
        UserError: everything that is wrong with the table.
    """
    axes, errors = dict(_axes(sweep)), []
    for name, values in axes.items():
        errors += [f"sweep.{name}: {trouble}" for trouble in _troubles(name, values, recipe)]
    if not axes:
        errors.append("sweep: found no setting; add one such as seeds = [1, 2, 3]")
    if "seeds" in axes and SEED in axes:
        errors.append(f"sweep: found both seeds and {SEED}, which are the same setting; keep one")
    if errors:
        raise UserError("\n".join(errors))
    if "seeds" in axes:
        axes[SEED] = axes.pop("seeds")  # the last one varies fastest
    names = short_names(axes)
    found = []
    for values in itertools.product(*axes.values()):
        parts = [f"{names[name]}={spell(value)}" for name, value in zip(axes, values, strict=True)]
        found.append(Point(_cut(",".join(parts), _LABEL), dict(zip(axes, values, strict=True))))
    return found


def with_values(recipe: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's table with some settings set by their whole names."""
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
    """Whole name -> its shortest ending of whole words that is the ending of no other: stage.base.optim.lr -> lr."""
    endings = {n: [".".join(n.split(".")[-i:]) for i in range(1, n.count(".") + 2)] for n in names}
    shared = Counter(e for mine in endings.values() for e in mine)
    return {name: next((e for e in mine if shared[e] == 1), name) for name, mine in endings.items()}


def spell(value: Any) -> str:
    """A value as part of a file's name; what cannot be in one, or is long, is told apart by a digest."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    safe = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.")
    return _cut(text, _VALUE) if safe == text else f"{safe[: _VALUE - 7]}~{digest_bytes(text.encode())[:6]}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 7]}~{digest_bytes(text.encode())[:6]}"


def _axes(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and lists; `stage.base.optim.lr = [...]` without quotes is a table of tables in TOML, and welcome."""
    if not isinstance(table, Mapping):
        raise UserError(f"sweep: found {table!r}, expected a table such as [sweep] with seeds = [1, 2, 3]")
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _troubles(name: str, values: Any, recipe: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one line; whether the setting exists below its stage is seen when a point is read."""
    head, *rest = name.split(".")
    stages = recipe.get("stage", {})
    if name == "run.name":
        yield "the name of the run cannot vary, its points are kept below it"
    elif not rest and name != "seeds":
        yield f"unknown setting; {nearest(name, ['seeds', SEED, *(f'stage.{s}.SETTING' for s in stages)])}"
    elif rest and head not in ("run", "stage"):
        yield f"unknown setting; {nearest(head, ['run', 'stage'])}"
    elif head == "stage" and rest[0] not in stages:
        yield f"no stage '{rest[0]}'; {nearest(rest[0], stages)}"
    elif head == "stage" and len(rest) < 2:
        yield "names a stage and no setting of it"
    if not isinstance(values, list):
        yield f"found {values!r}, expected a list such as [{json.dumps(values, default=str)}]"
    elif not values:
        yield "found an empty list, expected at least one value"
    elif len({spell(v) for v in values}) < len(values):
        yield f"found {values!r}, expected each value once"
