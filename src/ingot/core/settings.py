"""Settings models: the base of every table of a recipe, and the marks of fields that have a meaning of their own.

Settings models live beside the code that reads them, derive from `Settings`, and document each field by the string
below it.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from ingot.core.errors import notify


class Execution:
    """Marks a field that changes how fast or where a result is made, never the result.

    It is no part of the stage key: `workers: Annotated[int, EXECUTION] = 2`.
    """


EXECUTION = Execution()


class Stage:
    """Marks a field whose value names stages: a string, a list, or the keys of a table.

    This mark is the only place that knows it: inputs, `[repeat]` and error messages read it.

    Args:
        makes: what such a stage must make (`stages/kind.py: Kind.makes`); "": anything.
    """

    def __init__(self, makes: str = ""):
        self.makes = makes


STAGE = Stage()


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused, field docstrings kept for `--help` and schemas.

    Numbers are finite.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old name of a setting -> its name now. The old one is read, with a notice."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, table: Any) -> Any:
        old = [name for name in cls.RENAMED if isinstance(table, Mapping) and name in table]
        for name in old:
            notify(f"{name} is called {cls.RENAMED[name]} now; both are read")
            table = {cls.RENAMED.get(key, key): value for key, value in table.items()}
        return table

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What generators are seeded with."""


def canonical(value: Any) -> Any:
    """The part of a settings tree that determines results, as plain JSON data (EXECUTION fields left out)."""
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
    """All fields of a settings model (EXECUTION ones too) as plain data that validates back to the same model."""
    return settings.model_dump(mode="json", by_alias=True)


def stage_fields(settings: Settings) -> Iterator[tuple[str, Stage, list[str]]]:
    """The fields of a settings model that name stages: the field's name, its mark, and the stages that it names."""
    for name, field in type(settings).model_fields.items():
        mark, value = mark_of(field), getattr(settings, name)
        if mark and value:
            yield name, mark, [value] if isinstance(value, str) else list(value)


def mark_of(field: FieldInfo) -> Stage | None:
    """The mark of a field that names stages."""
    return next((m for m in field.metadata if isinstance(m, Stage)), None)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_in(inner)
