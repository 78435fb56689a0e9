"""Errors of validation as sentences: the setting, what was found and what was expected, in the words of a recipe."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ingot.core.errors import nearest, shortened
from ingot.core.settings import models_in

_MAX_VALUE_LENGTH = 200
"""Most characters of a wrong value that a sentence repeats."""
_EXPECTED = {
    "bool": "true or false",
    "float": "a number",
    "finite_number": "a finite number",
    "int": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "none_required": "nothing",
    "path": "a path",
    "string": "a text",
    **dict.fromkeys(("dict", "mapping", "model", "model_attributes"), "a table"),
    **dict.fromkeys(("frozen_set", "iterable", "list", "set", "tuple"), "a list"),
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "{min_length} or more characters",
    "too_long": "at most {max_length} values",
    "too_short": "{min_length} or more values",
    "union_tag_invalid": "{expected_tags}",
    "union_tag_not_found": "a table with {discriminator}",
}
"""Type of an error in pydantic, without `_type` and `_parsing` -> what was expected. Braces name its context."""
_ITEMS = {str: " of texts", int: " of whole numbers", float: " of numbers"}
_UNION_TAGS = ("bool", "constrained-float", "constrained-int", "constrained-str", "float", "int", "none", "str")


def problems(model: type[BaseModel], error: ValidationError, where: str = "", noun: str = "setting") -> list[str]:
    """A sentence for each wrong setting: `stage.base.seed: found 'x', expected a whole number (its description)`.

    Args:
        model: the model that was validated.
        error: its error.
        where: the table that was validated, such as "stage.base"; "" for names without a table.
        noun: word for the names in the table.
    """
    by_setting: dict[str, list[Any]] = {}  # a value that may have several types has an error for each
    errors = error.errors(include_url=False)
    wrong_lists = {one["loc"][:-1] for one in errors}  # pydantic does not count wrong items, and finds a list too short
    for one in errors:
        if one["type"] == "too_short" and one["loc"] in wrong_lists:
            continue
        by_setting.setdefault(".".join((where, *_Setting(model, one["loc"]).path)).strip("."), []).append(one)
    return [
        f"{name}: {sentence}" if name else sentence
        for name, errors in by_setting.items()
        for sentence in _sentences(model, errors, noun)
    ]


class _Setting:
    """A setting that a location of pydantic names.

    Args:
        model: the model that was validated.
        location: names and indices, among them the members of unions, which are not in the user's file.
    """

    def __init__(self, model: type[BaseModel], location: Sequence[str | int]):
        self.path: list[str] = []
        self.field: FieldInfo | None = None
        """Its field, or that of the list or table that has it as a value; None if there is none."""
        self.models: Sequence[type[BaseModel]] = [model]
        """The models that its table may have; the setting itself need not be one of their fields."""
        inner = self.models
        for part in map(str, location):
            if tagged := [m for m in inner if "kind" in m.model_fields and m.model_fields["kind"].default == part]:
                inner = tagged
            elif not _is_union_tag(part):
                self.path.append(part)
                self.models = inner
                fields = (pair for m in inner for pair in m.model_fields.items())
                if field := next((f for name, f in fields if part in (name, f.alias)), None):
                    self.field, inner = field, list(models_in(field.annotation))
                    self.path[-1] = field.alias or part

    @property
    def description(self) -> str:
        """The first sentence of its documentation."""
        if self.field is None:
            return "see `ingot init`"
        return " ".join((self.field.description or self.path[-1]).split()).partition(". ")[0]


def _is_union_tag(part: str) -> bool:
    """Whether part of a location names a plain type of a union, or a validator."""
    return any(c in part for c in "[(") or (part[:1].isupper() and part.isidentifier()) or part in _UNION_TAGS


def _sentences(model: type[BaseModel], errors: Sequence[Any], noun: str) -> Iterator[str]:
    """The sentences about one setting."""
    mismatches: list[Any] = []
    for error in errors:
        setting = _Setting(model, error["loc"])
        match error["type"]:
            case "extra_forbidden":
                known = [field.alias or name for m in setting.models for name, field in m.model_fields.items()]
                yield f"unknown {noun}; {nearest(setting.path[-1], known)}"
            case "missing":
                yield f"missing; add it ({setting.description})"
            case "value_error":
                yield str(error["ctx"]["error"])
            case _:
                mismatches.append(error)
    if mismatches:
        setting = _Setting(model, mismatches[0]["loc"])
        expected = " or ".join(dict.fromkeys(_expected(setting, error) for error in mismatches))
        found = mismatches[0].get("ctx", {}).get("tag", mismatches[0]["input"])
        found = str(found).lower() if isinstance(found, bool) else repr(found)
        yield f"found {shortened(found, _MAX_VALUE_LENGTH)}, expected {expected} ({setting.description})"


def _expected(setting: _Setting, error: Any) -> str:
    """What pydantic expected: "a list of texts", "at least 1", "'text' or 'chat'"."""
    kind = error["type"].removesuffix("_type").removesuffix("_parsing")
    context = {name: f"{v:g}" if isinstance(v, float) else v for name, v in error.get("ctx", {}).items()}
    expected = _EXPECTED.get(kind, "another value").format_map(context)
    if expected == "a list" and setting.field:
        return expected + _items(setting.field.annotation)
    return {"True": "true", "False": "false"}.get(expected, expected)


def _items(annotation: Any) -> str:
    """What the list in an annotation contains, such as " of texts"; empty for anything but plain values."""
    if get_origin(annotation) in (list, tuple, set, frozenset):
        return _ITEMS.get(get_args(annotation)[0], "")
    return next(filter(None, map(_items, get_args(annotation))), "")
