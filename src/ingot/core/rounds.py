"""`[repeat]` in a recipe: repeats some stages, each round from the results of the round before.

    [repeat]
    rounds = 3
    stages = ["sample", "pairs", "reward", "policy"]
    start  = { policy = "chat" }

The rounds are unrolled when the recipe is read: round i of stage `sample` becomes the stage `sample-i`. It has a key
like any other stage, so a killed loop resumes, and adding a fourth round leaves the first three as they are. A stage
name refers to:

    in a repeated stage         the same round, for a stage earlier in the list; the previous round, for the stage
                                itself and those later in the list (in round 1: the stage that `start` gives)
    in any other stage          the last round
    `pairs*`, in both           all rounds so far; a fraction is divided among them, and each has a limit such as
                                `max_epochs` by itself. Where there is no round yet: the stage that `start` gives, or
                                nothing

A file of human labels (`by = "better.jsonl"`) becomes one file a round: `better-1.jsonl` and so on.

Only fields with the mark `core/settings.py: Stage` are read as stage names, so a stage may be called `reward`.
"""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ingot.core.errors import UserError, nearest
from ingot.core.settings import mark_of, models_in

MAX_ROUNDS = 1000
"""Most rounds of a recipe. Each round adds its stages to the recipe and to every table."""
_SETTINGS = ("rounds", "stages", "start")


def unroll(recipe: Mapping[str, Any], kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """A recipe's table with its rounds unrolled, without `[repeat]`.

    Args:
        recipe: the table as read.
        kinds: stage kind -> its settings model, whose marks show which fields name stages.

    Raises:
        UserError: an error in `[repeat]`, or a name that refers to no stage in round 1.
    """
    table = {name: value for name, value in recipe.items() if name != "repeat"}
    if "repeat" not in recipe:
        return table
    stages = table.get("stage", {})
    repeat = recipe["repeat"]
    _check(repeat, stages)
    start, names = repeat.get("start", {}), repeat["stages"]
    models = {name: [m for m in [kinds.get(_kind(body))] if m] for name, body in stages.items()}
    unrolled: dict[str, Any] = {}
    for name, body in stages.items():
        if name not in names:
            scope = _Scope(names, repeat["rounds"], len(names), start, f"stage.{name}")
            unrolled[name] = scope.resolve(body, models[name])
        elif name == names[0]:  # all rounds are inserted at the first repeated stage
            for i in range(1, repeat["rounds"] + 1):
                for position, each in enumerate(names):
                    scope = _Scope(names, i, position, start, f"stage.{each}")
                    unrolled[f"{each}-{i}"] = scope.resolve(stages[each], models[each])
    return {**table, "stage": unrolled}


def _kind(body: Any) -> str:
    return str(body.get("kind")) if isinstance(body, Mapping) else ""


def _fields(models: list[type[BaseModel]], name: str) -> list[FieldInfo]:
    """The fields of some models with that name or alias."""
    return [f for model in models for n, f in model.model_fields.items() if name in (n, f.alias)]


def _matching(models: list[type[BaseModel]], table: Mapping[str, Any]) -> list[type[BaseModel]]:
    """The models that a table may belong to: those of its `kind`, if it has one."""
    kind = table.get("kind")
    same = [model for model in models if kind and getattr(model.model_fields.get("kind"), "default", None) == kind]
    return same or models


def _check(repeat: Any, stages: Mapping[str, Any]) -> None:
    if not isinstance(repeat, Mapping):
        raise UserError(f"repeat: found {repeat!r}, expected a table with rounds and stages")
    if unknown := [name for name in repeat if name not in _SETTINGS]:
        raise UserError(f"repeat.{unknown[0]}: unknown setting; {nearest(unknown[0], _SETTINGS)}")
    rounds, names, start = repeat.get("rounds"), repeat.get("stages"), repeat.get("start", {})
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 1 <= rounds <= MAX_ROUNDS:
        raise UserError(f"repeat.rounds: found {rounds!r}, expected a number from 1 to {MAX_ROUNDS:,}")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"repeat.stages: found {names!r}, expected the names of the stages of a round, in their order")
    if len(set(names)) < len(names):
        raise UserError(f"repeat.stages: found {names!r}, expected each name once")
    if not isinstance(start, Mapping):
        raise UserError(f'repeat.start: found {start!r}, expected a table such as {{ policy = "chat" }}')
    for where, known, used in (("stages", stages, names), ("start", names, start)):
        for name in used:
            if name not in known:
                raise UserError(f"repeat.{where}: no stage '{name}'; {nearest(name, known)}")
    for name in names:
        for i in range(1, rounds + 1):
            if f"{name}-{i}" in stages:
                raise UserError(f"stage.{name}-{i}: is the name of a round of '{name}'; rename the stage")


class _Scope:
    """Resolves stage names within one stage of one round.

    Args:
        names: the stages of a round, in order.
        i: the round, from 1.
        position: index of the stage in `names`; their number for a stage that is not repeated.
        start: name -> the stage that it refers to before round 1.
        where: the stage, for errors.
    """

    def __init__(self, names: list[str], i: int, position: int, start: Mapping[str, str], where: str):
        self._names, self._i, self._position, self._start, self._where = names, i, position, start, where

    def resolve(self, value: Any, models: list[type[BaseModel]]) -> Any:
        """A stage's table, or a value within it, with stage names replaced by those of this round.

        Args:
            value: plain data of the recipe.
            models: the settings models that the value may belong to.
        """
        if isinstance(value, list):
            return [self.resolve(v, models) for v in value]
        if not isinstance(value, Mapping):
            return value
        resolved = {}
        for name, inner in value.items():
            fields = _fields(_matching(models, value), name)
            if marks := [*filter(None, map(mark_of, fields))]:
                resolved[name] = self._stage_field(inner, marks[0].divided)
            else:
                resolved[name] = self.resolve(inner, [m for field in fields for m in models_in(field.annotation)])
        return resolved

    def _stage_field(self, value: Any, divided: bool) -> Any:
        """The value of a field that names stages: a stage, a list of stages, or a table of fractions or limits."""
        if isinstance(value, str):
            return self._one(value)
        if isinstance(value, list):
            return [stage for v in value for stage in (self._all(v) if isinstance(v, str) else [v])]
        if not isinstance(value, Mapping):
            return value
        return self._fractions(value) if divided else self._limits(value)

    def _limits(self, table: Mapping[str, Any]) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for name, limit in table.items():
            for stage in self._all(name):
                before = resolved.get(stage, limit)  # in round 1 two names may refer to one stage: the lower limit
                both = isinstance(limit, int | float) and isinstance(before, int | float)
                resolved[stage] = min(limit, before) if both else limit
        return resolved

    def _fractions(self, table: Mapping[str, Any]) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for name, fraction in table.items():
            stages = self._all(name)
            for stage in stages:
                each = fraction / len(stages) if isinstance(fraction, int | float) and len(stages) > 1 else fraction
                before = resolved.get(stage)  # in round 1 two names may refer to one stage: add their fractions
                resolved[stage] = each + before if isinstance(before, int | float) else each
        return resolved

    def _all(self, name: str) -> list[str]:
        """The stages that a name refers to: several for `name*`."""
        if not name.endswith("*") or name[:-1] not in self._names:
            return [self._one(name)]
        name = name[:-1]
        done = [f"{name}-{i}" for i in range(1, self._newest(name) + 1)]
        return done or ([self._start[name]] if name in self._start else [])

    def _one(self, name: str) -> str:
        if name not in self._names:
            stem, suffix = os.path.splitext(name)
            repeated = self._position < len(self._names)
            return f"{stem}-{self._i}{suffix}" if repeated and suffix == ".jsonl" else name
        if newest := self._newest(name):
            return f"{name}-{newest}"
        if name not in self._start:
            raise UserError(
                f"{self._where}: found '{name}' in round 1, which has no earlier round of it; name a stage for it with "
                f'[repeat] start = {{ {name} = "STAGE" }}'
            )
        return self._start[name]

    def _newest(self, name: str) -> int:
        """The newest round of a stage that precedes this one; 0 if there is none."""
        return self._i if self._names.index(name) < self._position else self._i - 1
