"""The base class of settings models (tables of a recipe), and the marks of fields that have a special role.

A settings model stands beside the code that reads it, derives from `Settings`, and documents each field with the string
below it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ingot.core.errors import notify


class Execution:
    """Marks a field that affects speed or placement and never the result: `workers: Annotated[int, EXECUTION] = 2`.

    The field is not part of the stage key.
    """


EXECUTION = Execution()


class Stage:
    """Marks a field whose value names stages: a string, a list, or the keys of a table.

    Inputs, `[repeat]` and error messages are derived from this mark alone.

    Args:
        makes: the required output of such a stage (`stages/kind.py: Kind.makes`); "": any.
        divided: whether the value of `name*` in a table is a fraction, which the rounds of a stage divide among them.
    """

    def __init__(self, makes: str = "", divided: bool = True):
        self.makes, self.divided = makes, divided


STAGE = Stage()


class Settings(BaseModel):
    """Base of every settings model: frozen, finite numbers, no unknown keys, field docstrings as descriptions."""

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old name of a setting -> current name. The old name is accepted, with a notice."""

    @model_validator(mode="before")
    @classmethod
    def _take_no_other_type(cls, table: Any) -> Any:
        """Refuse what pydantic would take for something else: true as 1, "0.5" as 0.5, 1 and "no" as true and false.

        It runs after `_read_old_names`, as the last of these validators runs first.
        """
        if isinstance(table, Mapping):
            fields = [
                (f.alias if f.alias and f.alias in table else n, f.annotation) for n, f in cls.model_fields.items()
            ]
            if errors := [e for name, type_ in fields for e in _other_types(table.get(name), [type_], (name,))]:
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return table

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        renamed = {old: new for old, new in cls.RENAMED.items() if old in table and new not in table}
        for old, new in renamed.items():
            notify(f"{old} is now called {new}; both names work")
        return {renamed.get(name, name): value for name, value in table.items()}

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Seed of random number generators: a signed 64-bit integer."""


_SCALARS: Mapping[type, TypeAdapter[Any]] = {type_: TypeAdapter(type_) for type_ in (int, float, bool)}


def _other_types(value: Any, union: Iterable[Any], location: tuple[str | int, ...]) -> Iterator[Any]:
    """An error, as pydantic takes it, for each scalar that pydantic would turn into one of another type.

    Args:
        value: a value as in the recipe. Tables of models are left to those.
        union: the types that it may have. A short form is checked as what its validator makes of it.
        location: the name of the setting, and keys in it.
    """
    for one in union:
        value = _rewritten(value, one)
    types = {member for one in union for member in _members(one, value)}
    if isinstance(value, bool | int | float | str):
        if taken := _taken_as(value, types):
            yield {"type": f"{taken.__name__}_type", "loc": location, "input": value}
        return
    table = isinstance(value, Mapping)
    items = value.items() if table else enumerate(value) if isinstance(value, list | tuple) else ()
    inner = [t for one in types for t in get_args(one)[1 if table else 0 :] if t is not Ellipsis]
    for key, item in items:
        yield from _other_types(item, inner, (*location, key))


def _taken_as(value: bool | float | str, types: set[Any]) -> type | None:
    """The type that pydantic would turn a scalar into; None if it keeps its own, or gets an error or a validator."""
    own = {bool} if isinstance(value, bool) else {int, float} if isinstance(value, int | float) else {str}
    known = {one for one in types if one in _SCALARS or one is NoneType or get_origin(one) in (list, tuple, dict)}
    known |= {one for one in types if isinstance(one, type) and issubclass(one, BaseModel)}
    if own & types or Any in types or (isinstance(value, str) and known != types):
        return None
    for type_, adapter in _SCALARS.items():
        if type_ in types:
            with suppress(ValidationError):
                adapter.validate_python(value)
                return type_
    return None


def _rewritten(value: Any, annotation: Any) -> Any:
    """What the validators before an annotation make of a value; None where they refuse it, as they will say again."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for one in get_args(annotation):
            try:
                validator: Any = one.func if isinstance(one, BeforeValidator) else None
                value = validator(value) if validator else _rewritten(value, one)
            except ValueError:
                return None
    return value


def _members(annotation: Any, value: Any) -> Iterator[Any]:
    """The members of a union, without marks, and the types of literal values: of texts only the one that is there."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from (type(one) for one in arguments if not isinstance(one, str) or one == value)
    elif origin in (Annotated, Union, UnionType):
        for member in arguments[:1] if origin is Annotated else arguments:
            yield from _members(member, value)
    else:
        yield annotation


def canonical(value: Any) -> Any:
    """Settings that determine the result, as plain JSON data: everything but EXECUTION fields."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            name: canonical(getattr(value, name))
            for name, field in fields.items()
            if not any(isinstance(m, Execution) for m in field.metadata)
        }
    if isinstance(value, Mapping):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    return value


def settings_tree(settings: BaseModel) -> dict[str, Any]:
    """All settings, EXECUTION fields included, as plain data that validates back to the same model."""
    return settings.model_dump(mode="json", by_alias=True)


def stage_fields(settings: Settings) -> Iterator[tuple[str, Stage, list[str]]]:
    """Fields that name stages and are set: (field name, mark, names of the stages)."""
    for name, field in type(settings).model_fields.items():
        mark, value = mark_of(field), getattr(settings, name)
        if mark and value:
            yield name, mark, [value] if isinstance(value, str) else list(value)


def mark_of(field: FieldInfo) -> Stage | None:
    """The `Stage` mark of a field; None for a field that names no stages."""
    return next((m for m in field.metadata if isinstance(m, Stage)), None)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_in(inner)
