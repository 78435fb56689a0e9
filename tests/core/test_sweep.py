"""`[sweep]`: combinations in order, names for directories, and a sentence for every mistake."""

from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.core.recipe import load_recipe, load_recipes
from ingot.core.settings import Settings
from ingot.core.sweep import points, short_names, value_label, with_values

RECIPE = {"run": {"name": "x"}, "stage": {"base": {"optim": {"lr": 1}}, "chat": {}}}


class Inner(Settings):
    lr: float = 0.1
    """Rate."""
    kind: str = "a"
    """Kind."""


class Thing(Settings):
    depth: int = 1
    """How deep."""
    optim: Inner = Inner()
    """Inside."""


def _load(tmp_path: Path, sweep: str, *overrides: str) -> Any:
    text = f'[run]\nname = "x"\n[stage.base]\nkind = "thing"\n[stage.chat]\nkind = "thing"\n[sweep]\n{sweep}\n'
    (tmp_path / "r.toml").write_text(text)
    return load_recipes(tmp_path / "r.toml", list(overrides), {"thing": Thing})


def test_every_combination_once_with_seeds_fastest(tmp_path: Path) -> None:
    recipes = _load(tmp_path, 'seeds = [1, 2]\n"stage.base.optim.lr" = [1e-3, 2e-3]\n"stage.chat.depth" = [4]')
    assert [r.home for r in recipes] == [
        f"x/lr={lr},depth=4,seed={seed}" for lr in ("0.001", "0.002") for seed in (1, 2)
    ]
    assert [(r.stages["base"][1].optim.lr, r.run.seed) for r in recipes] == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    assert {r.stages["chat"][1].depth for r in recipes} == {4}
    assert {r.stages["base"][1].depth for r in recipes} == {1}


def test_names_without_quotes_and_set_reach_the_sweep(tmp_path: Path) -> None:
    recipes = _load(tmp_path, "stage.base.optim.lr = [1.0, 2.0]")
    assert [r.home for r in recipes] == ["x/lr=1.0", "x/lr=2.0"]
    recipes = _load(tmp_path, "stage.base.optim.lr = [1.0, 2.0]", "sweep.stage.base.optim.lr=[3.0]", "run.seed=7")
    assert [(r.home, r.run.seed) for r in recipes] == [("x/lr=3.0", 7)]
    recipes = _load(tmp_path, '"stage.base.optim.lr" = [1.0, 2.0]', 'sweep."stage.base.optim.lr"=[4.0]')
    assert [r.home for r in recipes] == ["x/lr=4.0"], "a quoted name may hold dots"
    assert _load(tmp_path, "seeds = [1]", "stage.base.depth=5")[0].stages["base"][1].depth == 5


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        ('"stage.base.optim.lrr" = [1]', "stage.base.optim.lrr: unknown setting; did you mean 'lr'?"),
        ('"stage.bsae.depth" = [1]', "sweep.stage.bsae.depth: no stage 'bsae'; did you mean 'base'?"),
        ('"run.sed" = [1]', "run.sed: unknown setting; did you mean 'seed'?"),
        ("sed = [1]", "sweep.sed: unknown setting; did you mean 'seeds'?"),
        ("lr = [1]", "sweep.lr: unknown setting; known: run.seed, seeds, stage.base.SETTING, stage.chat.SETTING"),
        ('"stag.base.depth" = [1]', "sweep.stag.base.depth: unknown setting; did you mean 'stage'?"),
        ('"stage.base" = [1]', "sweep.stage.base: found a stage, expected one of its settings"),
        ('"run.name" = ["a"]', "sweep.run.name: the name of the run cannot vary"),
        ("seeds = []", "sweep.seeds: found an empty list, expected at least one value"),
        ("seeds = 3", "sweep.seeds: found 3, expected a list such as [3]"),
        ("seeds = [1, 1]", "sweep.seeds: found [1, 1], expected each value once"),
        ('seeds = ["a"]', "run.seed: found 'a', expected a whole number"),
        ('"stage.base.depth" = [1, "deep"]', "stage.base.depth: found 'deep', expected a whole number"),
        ("", "sweep: found no setting; add one such as seeds = [1, 2, 3]"),
        ('seeds = [1]\n"run.seed" = [2]', "sweep: found both seeds and run.seed"),
        ('"stage.base.depth.x" = [1]', "stage.base.depth: found {'x': 1}, expected a whole number"),
    ],
)
def test_sentences(tmp_path: Path, sweep: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _load(tmp_path, sweep)
    assert sentence in str(error.value)
    assert str(error.value).count(sentence[:40]) == 1  # not once for every point


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        _load(tmp_path, 'seeds = []\n"stage.bsae.depth" = [1]')
    assert len(str(error.value).splitlines()) == 2


def test_an_override_of_what_varies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set stage\.base\.depth: found in \[sweep\].*set sweep\.stage\.base\.depth"):
        _load(tmp_path, '"stage.base.depth" = [1, 2]', "stage.base.depth=3")
    with pytest.raises(UserError, match=r"--set stage\.base\.optim\.lr: .* varies stage\.base\.optim; set sweep\."):
        _load(tmp_path, '"stage.base.optim" = [{ lr = 1e-3 }, { lr = 2e-3 }]', "stage.base.optim.lr=3e-3")
    with pytest.raises(UserError, match=r"set sweep\.seeds to a list"):
        _load(tmp_path, "seeds = [1, 2]", "run.seed=3")


def test_a_sweep_is_no_single_recipe(tmp_path: Path) -> None:
    _load(tmp_path, "seeds = [1, 2]")
    with pytest.raises(UserError, match=r"found a \[sweep\], expected a single recipe"):
        load_recipe(tmp_path / "r.toml", [], {"thing": Thing})


def test_short_names_are_the_shortest_endings_that_differ() -> None:
    assert short_names(["stage.base.optim.lr", "run.seed"]) == {"stage.base.optim.lr": "lr", "run.seed": "seed"}
    both = ["stage.base.optim.lr", "stage.chat.optim.lr", "stage.chat.optim.betas"]
    assert list(short_names(both).values()) == ["base.optim.lr", "chat.optim.lr", "betas"]
    assert short_names(["run.seed", "stage.run.seed"])["run.seed"] == "run.seed"


def test_values_are_safe_and_unique_names_of_directories() -> None:
    assert [value_label(v) for v in (1e-3, 1e-5, 3, True, "5 steps", "cosine")][:4] == ["0.001", "1e-05", "3", "true"]
    assert value_label("cosine") == "cosine"
    nasty = ["a/b", "a-b", "a b", "../..", ".", "", "x" * 300, "x" * 301, {"a": 0.5}, {"a": [1]}, [0.9, 0.95], "ä"]
    spelled = [value_label(v) for v in nasty]
    assert len(set(spelled)) == len(nasty)
    for text in spelled:
        assert len(text) <= 24
        assert "/" not in text
        assert text.isascii()
    many = {f"stage.base.a{i}": ["y" * 30] for i in range(40)}
    (point,) = points(many, RECIPE)
    assert len(point.label) <= 120


def test_setting_values_leaves_the_recipe_alone() -> None:
    out = with_values(RECIPE, {"stage.base.optim.lr": 2, "stage.chat.optim.betas": [1], "run.seed": 3})
    assert RECIPE["stage"]["base"]["optim"] == {"lr": 1}  # type: ignore[index]
    assert out["stage"]["base"]["optim"] == {"lr": 2}
    assert out["stage"]["chat"] == {"optim": {"betas": [1]}}
    assert out["run"] == {"name": "x", "seed": 3}
