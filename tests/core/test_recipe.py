"""The recipe's strictness, beyond what the command line's tests show."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.core.recipe import _apply_override, dump_toml, load_recipe, load_recipes, read_table
from ingot.core.settings import EXECUTION, Settings, canonical, settings_tree


class Inner(Settings):
    width: int = 4
    """Width."""


class Span(Settings):
    end: int
    """Where it ends, counted from
    the beginning. More about it."""


class Thing(Settings):
    depth: int
    """How deep."""
    inner: Inner = Inner()
    """Inside."""
    span: Span | None = None
    """From where to where."""
    workers: Annotated[int, EXECUTION] = 2
    """How many hands."""


def _load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "r.toml"
    path.write_text('[run]\nname = "x"\n' + text)
    return load_recipe(path, list(overrides), {"thing": Thing})


def test_defaults_and_override(tmp_path: Path) -> None:
    recipe = _load(tmp_path, '[stage.a]\nkind = "thing"\ndepth = 3\n', "stage.a.inner.width=9", "run.seed=5")
    kind, settings = recipe.stages["a"]
    assert (kind, settings, recipe.run.seed) == ("thing", Thing(depth=3, inner=Inner(width=9)), 5)


def test_execution_fields_are_not_canonical() -> None:
    assert canonical(Thing(depth=1, workers=7)) == {"depth": 1, "inner": {"width": 4}, "span": None}


def test_settings_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Thing(depth=1).depth = 2  # type: ignore[misc]


def test_resolved_settings_are_toml_and_validate_back() -> None:
    import tomllib

    thing = Thing(depth=1, inner=Inner(width=8))
    assert Thing.model_validate(tomllib.loads(dump_toml(settings_tree(thing)))) == thing


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[stage.a]\nkind = "thing"\n', "stage.a.depth: missing; add it (How deep.)"),
        (
            '[stage.a]\nkind = "thing"\ndepth = 1\ninner = { widht = 3 }\n',
            "stage.a.inner.widht: unknown setting; did you mean 'width'?",
        ),
        (
            '[stage.a]\nkind = "thing"\ndepth = 1\nspan = {}\n',
            "stage.a.span.end: missing; add it (Where it ends, counted from the beginning)",
        ),
        (
            '[stage.a]\nkind = "thing"\ndepth = 1\ninner = 3\n',
            "stage.a.inner: found 3, expected a table (Inside.)",
        ),
        (
            f'[stage.a]\nkind = "thing"\ndepth = [{"1, " * 999}]\n',
            f"stage.a.depth: found [{'1, ' * 65}1...",
        ),
        (f"a = {'[' * 3000}{']' * 3000}\n", "found tables or lists nested hundreds deep, expected a recipe"),
        ('sinks = "tensorboard"\n', "run.sinks: found 'tensorboard', expected a list of texts (Dashboards"),
        ("[stage.a]\ndepth = 1\n", "stage.a: no kind; every stage needs kind = one of thing"),
        ('[stage."a@b"]\nkind = "thing"\n', "stage.a@b: the name may not contain '@'"),
        ('[stage.""]\nkind = "thing"\n', "stage.: the name has 0 bytes, expected 1 to 100; rename the stage"),
        (f'[stage."{"ä" * 51}"]\nkind = "thing"\n', "the name has 102 bytes"),
        ('[stage."a\\nb"]\nkind = "thing"\n', "the name may not contain"),
        ('[stage."report.html"]\nkind = "thing"\n', "every run's directory has a file named report.html"),
        ('[stage."sweep.json"]\nkind = "thing"\n', "every run's directory has a file named sweep.json"),
        ("", "no stages; add a table such as [stage.clean]"),
        ("[stages]\n", "unknown table [stages]; did you mean 'stage'?"),
    ],
)
def test_sentences(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _load(tmp_path, text)
    assert sentence in str(error.value)


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = "[run]\nname = 'x'\n[stage.a]\nkind = 'thing'\ndepth = 3\n"
    (tmp_path / "r.toml").write_text(text, encoding="utf-8-sig")
    assert load_recipe(tmp_path / "r.toml", [], {"thing": Thing}).stages["a"][1] == Thing(depth=3)


@pytest.mark.parametrize("seed", ["9223372036854775808", "-9223372036854775809"])
def test_a_seed_is_a_number_of_64_bits(tmp_path: Path, seed: str) -> None:
    with pytest.raises(UserError, match=r"run\.seed: found"):
        _load(tmp_path, '[stage.a]\nkind = "thing"\ndepth = 1\n', f"run.seed={seed}")
    assert _load(tmp_path, '[stage.a]\nkind = "thing"\ndepth = 1\n', "run.seed=-7").run.seed == -7


def test_an_override_of_a_stage_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = '[stage.base]\nkind = "thing"\ndepth = 1\n'
    with pytest.raises(UserError, match=r"--set stage\.bas\.depth=2: no stage 'bas'; did you mean 'base'\?"):
        _load(tmp_path, text, "stage.bas.depth=2")
    made = _load(tmp_path, text, "stage.more.kind='thing'", "stage.more.depth=2")  # a new one begins with its kind
    assert made.stages["more"][1].depth == 2


@pytest.mark.parametrize(
    "override", ["depth", "=3", "run.name.x=3", "run.seed=1\n[run]\nname = 2", "run.seed=1\nother = 2"]
)
def test_wrong_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="--set"):
        _load(tmp_path, '[stage.a]\nkind = "thing"\ndepth = 1\n', override)


@pytest.mark.parametrize("text", ["1 # a note", '"a" # a note', "1\nother = 2", "{ a = 1 } # a note", "1\n[stage.c]"])
def test_an_override_is_one_value_and_nothing_behind_it(text: str) -> None:
    with pytest.raises(UserError, match="found more than one setting, or a comment, expected one value"):
        _apply_override({"stage": {"b": {}}}, f"stage.b.seed={text}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (" 1\n", 1),
        ('"a # b"', "a # b"),
        ("a # b", "a # b"),
        ("[1, # one\n2]", [1, 2]),
        (".5", 0.5),
        ("1.", 1.0),
        ("False", False),
    ],
)
def test_an_override_may_contain_what_a_comment_looks_like(text: str, value: object) -> None:
    table: dict[str, Any] = {"stage": {"b": {}}}
    _apply_override(table, f"stage.b.seed={text}")
    assert table["stage"]["b"]["seed"] == value


def test_numpy_in_a_table_is_plain() -> None:
    _, _, table = read_table({"a": np.int64(3), "b": [np.float32(0.5), np.True_], "c": np.arange(2)})
    assert json.dumps(table) == '{"a": 3, "b": [0.5, true], "c": [0, 1]}'


def test_a_recipe_may_be_a_table(tmp_path: Path) -> None:
    """The same stages as the file's; the caller's table stays as it is."""
    table = {"run": {"name": "x"}, "stage": {"a": {"kind": "thing", "depth": 3, "span": None, "inner": {"width": 5}}}}
    before = repr(table)
    (recipe,) = load_recipes(table, ["stage.a.inner.width=9"], {"thing": Thing})
    assert recipe.stages == _load(tmp_path, '[stage.a]\nkind = "thing"\ndepth = 3\ninner.width = 9\n').stages
    assert repr(table) == before
    assert load_recipes(recipe.table, [], {"thing": Thing})[0].stages == recipe.stages
    mistaken = {"run": {"name": "x"}, "stage": {"a": {"kind": "thing", "depth": 3, "dept": 3}}}
    with pytest.raises(UserError, match=r"^stage\.a\.dept: unknown setting"):
        load_recipes(mistaken, [], {"thing": Thing})
    with pytest.raises(UserError, match=r"^recipe: no stages"):
        load_recipes({"run": {"name": "x"}}, [], {"thing": Thing})
