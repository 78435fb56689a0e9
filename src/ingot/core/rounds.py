"""`[repeat]` in a recipe: some stages again and again, each round from what the round before has made.

    [repeat]
    rounds = 3
    stages = ["sample", "pairs", "reward", "policy"]
    start  = { policy = "chat" }

Round i of stage `sample` is a stage of its own, `sample-i`, written out when the recipe is read: it has a key like any
other, so a killed loop goes on, and a fourth round leaves the first three as they are. What a name of the list means:

    in a stage of the list      this round's, of a stage before it in the list; the last round's of itself and of those
                                after it (in round 1: what `start` names for it)
    in every other stage        the last round's
    `pairs*`, in either         every round's so far; a share is divided among them. In round 1, where there is none yet
                                of a stage not before it, what `start` names, or else nothing

What people fill in (`by = "better.jsonl"`) is a file for each round, `better-1.jsonl` and so on.

Names mean stages only in fields that are marked so (`core/settings.py: Stage`), so a stage may be called `reward`.

Rejected: a loop at run time (what a run will do could not be planned, and a stage's key would depend on its history).
"""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ingot.core.errors import UserError, nearest
from ingot.core.settings import mark_of, models_in

MOST = 1000
"""Rounds of a recipe: each is stages of its own, with lines of their own in every table."""
_KNOWN = ("rounds", "stages", "start")


def unrolled(recipe: Mapping[str, Any], kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """A recipe's table with its rounds written out, without `[repeat]`.

    Args:
        kinds: stage kind -> its settings model, which says the fields that name stages.

    Raises:
        UserError: what is wrong with the table `[repeat]`, or a name that means nothing in round 1.
    """
    table = {name: value for name, value in recipe.items() if name != "repeat"}
    if "repeat" not in recipe:
        return table
    stages = table.get("stage", {})
    repeat = recipe["repeat"]
    _check(repeat, stages)
    start, names = repeat.get("start", {}), repeat["stages"]
    models = {name: [m for m in [kinds.get(_kind(body))] if m] for name, body in stages.items()}
    found: dict[str, Any] = {}
    for name, body in stages.items():
        if name not in names:
            here = _Names(names, repeat["rounds"], len(names), start, f"stage.{name}")
            found[name] = here.resolved(body, models[name])
        elif name == names[0]:  # the rounds stand where the first of their stages does
            for i in range(1, repeat["rounds"] + 1):
                for place, each in enumerate(names):
                    here = _Names(names, i, place, start, f"stage.{each}")
                    found[f"{each}-{i}"] = here.resolved(stages[each], models[each])
    return {**table, "stage": found}


def _kind(body: Any) -> str:
    return str(body.get("kind")) if isinstance(body, Mapping) else ""


def _field(models: list[type[BaseModel]], name: str) -> list[FieldInfo]:
    """The fields of that name, or of that alias, of some models."""
    return [f for model in models for n, f in model.model_fields.items() if name in (n, f.alias)]


def _of_kind(models: list[type[BaseModel]], table: Mapping[str, Any]) -> list[type[BaseModel]]:
    """The models that a table may be: those of its kind, where it says one."""
    kind = table.get("kind")
    same = [model for model in models if kind and getattr(model.model_fields.get("kind"), "default", None) == kind]
    return same or models


def _check(repeat: Any, stages: Mapping[str, Any]) -> None:
    if not isinstance(repeat, Mapping):
        raise UserError(f"repeat: found {repeat!r}, expected a table with rounds and stages")
    if unknown := [name for name in repeat if name not in _KNOWN]:
        raise UserError(f"repeat.{unknown[0]}: unknown setting; {nearest(unknown[0], _KNOWN)}")
    rounds, names, start = repeat.get("rounds"), repeat.get("stages"), repeat.get("start", {})
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 1 <= rounds <= MOST:
        raise UserError(f"repeat.rounds: found {rounds!r}, expected how often, a number from 1 to {MOST:,}")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"repeat.stages: found {names!r}, expected the names of the stages of a round, in their order")
    if len(set(names)) < len(names):
        raise UserError(f"repeat.stages: found {names!r}, expected each name once")
    if not isinstance(start, Mapping):
        raise UserError(f'repeat.start: found {start!r}, expected a table such as {{ policy = "chat" }}')
    for where, known, asked in (("stages", stages, names), ("start", names, start)):
        for name in asked:
            if name not in known:
                raise UserError(f"repeat.{where}: no stage '{name}'; {nearest(name, known)}")
    for name in names:
        for i in range(1, rounds + 1):
            if f"{name}-{i}" in stages:
                raise UserError(f"stage.{name}-{i}: is the name of a round of '{name}'; rename the stage")


class _Names:
    """What names mean in one stage of one round.

    Args:
        names: the stages of a round, in order.
        i: the round, from 1.
        place: where the stage stands in `names`; behind all of them for a stage that is not repeated.
        start: name -> what it means before round 1.
        where: the stage, as errors name it.
    """

    def __init__(self, names: list[str], i: int, place: int, start: Mapping[str, str], where: str):
        self._names, self._i, self._place, self._start, self._where = names, i, place, start, where

    def resolved(self, value: Any, models: list[type[BaseModel]]) -> Any:
        """A stage's table, or a part of it, with the names of this round.

        Args:
            models: what the table may be.
        """
        if isinstance(value, list):
            return [self.resolved(v, models) for v in value]
        if not isinstance(value, Mapping):
            return value
        found = {}
        for name, inner in value.items():
            fields = _field(_of_kind(models, value), name)
            if any(map(mark_of, fields)):
                found[name] = self._named(inner)
            else:
                found[name] = self.resolved(inner, [m for field in fields for m in models_in(field.annotation)])
        return found

    def _named(self, value: Any) -> Any:
        """The value of a field that names stages: a stage, a list of stages, or a table of their shares."""
        if isinstance(value, str):
            return self._one(value)
        if isinstance(value, list):
            return [one for v in value for one in (self._all(v) if isinstance(v, str) else [v])]
        return self._shares(value) if isinstance(value, Mapping) else value

    def _shares(self, table: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, share in table.items():
            stages = self._all(name)
            for stage in stages:
                part = share / len(stages) if isinstance(share, int | float) and len(stages) > 1 else share
                before = found.get(stage)  # two names may mean one stage in round 1: it has both shares
                found[stage] = part + before if isinstance(before, int | float) else part
        return found

    def _all(self, name: str) -> list[str]:
        """The stages of a name, several for `name*`."""
        if not name.endswith("*") or name[:-1] not in self._names:
            return [self._one(name)]
        name = name[:-1]
        done = [f"{name}-{i}" for i in range(1, self._newest(name) + 1)]
        return done or ([self._start[name]] if name in self._start else [])

    def _one(self, name: str) -> str:
        if name not in self._names:
            stem, suffix = os.path.splitext(name)
            repeated = self._place < len(self._names)
            return f"{stem}-{self._i}{suffix}" if repeated and suffix == ".jsonl" else name
        if newest := self._newest(name):
            return f"{name}-{newest}"
        if name not in self._start:
            raise UserError(
                f"{self._where}: names '{name}', which has no round before the first; say what it means there with "
                f'[repeat] start = {{ {name} = "STAGE" }}'
            )
        return self._start[name]

    def _newest(self, name: str) -> int:
        """The newest round of a stage that is made before this one is; 0 where there is none."""
        return self._i if self._names.index(name) < self._place else self._i - 1
