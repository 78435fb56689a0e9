"""`ingot tune` on a tiny stage: `run` begins with what was fastest, and plain torch was among what was tried."""

import json
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.gc import orphans
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import run
from ingot.pipeline.tune import Trial, _candidates, tune
from ingot.stages.training.settings import TrainSettings

RECIPE = """
[run]
name = "tiny"

[stage.text]
kind    = "corpus"
sources = ["text.txt"]
quality = "none"
holdout = { fraction = 0.1, by = "tail" }

[stage.chars]
kind = "tokenizer"
from = "text"
type = "char"

[stage.base]
kind      = "train"
data      = { text = 1.0 }
tokenizer = "chars"
model     = { depth = 1, width = 16, heads = 2, context = 16 }
batch     = 4
duration  = "12 steps"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path / "tiny.toml"


@pytest.mark.slow
def test_the_winner_is_what_run_begins_with(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = [{"precision": "fp32", "backend": "torch"}, {"backend": "torch", "micro_batch": 2}]
    monkeypatch.setattr("ingot.pipeline.tune._candidates", lambda settings, trials: iter(tried))
    said: list[str] = []
    trials, path = tune(recipe, [], "base", tmp_path / "runs", 5, said.append)
    assert [t.total_s for t in trials] == sorted(t.total_s for t in trials)
    assert sorted(str(t.candidate) for t in trials) == sorted(map(str, tried))
    assert all(0 < t.step_s < t.start_s < t.total_s for t in trials)
    chosen = json.loads(path.read_text())
    assert chosen == trials[0].execution
    assert said[0] == "trying precision fp32, backend torch"
    assert path.parent not in {o.path for o in orphans(tmp_path / "runs")}, "it waits for the run"

    graph = load_graph(recipe, [], tmp_path / "runs")
    run(graph, ["base"], lambda *_: None, quiet=True)
    began = json.loads((graph.stage(graph.nodes["base"]) / "execution.json").read_text())
    assert began == chosen
    with pytest.raises(
        UserError, match=r"base: found a stage that has run already .*, expected one that has not started"
    ):
        tune(recipe, [], "base", tmp_path / "runs", 5, said.append)


@pytest.mark.slow
def test_a_stage_of_too_few_steps_says_so(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base: found 2 steps, expected 3 or more"):
        tune(recipe, ['stage.base.duration="2 steps"'], "base", tmp_path / "runs", 5, lambda _: None)


def test_only_a_train_stage_is_tuned(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage: found 'chars', expected a train stage of the recipe: base"):
        tune(recipe, [], "chars", tmp_path / "runs", 5, print)


def test_candidates_begin_with_plain_torch_and_vary_the_best(recipe: Path, tmp_path: Path) -> None:
    settings = load_graph(recipe, [], tmp_path / "runs").nodes["base"].settings
    assert isinstance(settings, TrainSettings)
    execution = {"micro_batch": 8, "threads": 2, "backend": "cpu"}
    trials = [
        Trial({"backend": "compiled"}, 1.0, 9.0, 90.0, execution),
        Trial({"backend": "torch"}, 2.0, 3.0, 80.0, execution),
    ]
    found = list(_candidates(settings, trials))
    assert found[:2] == [{"precision": "fp32", "backend": "torch"}, {"backend": "auto"}]
    assert found[2:4] == [{"backend": "torch"}, {"backend": "compiled"}]
    assert found[4:] == [
        {"backend": "torch", **more} for more in ({"micro_batch": 4}, {"micro_batch": 2}, {"threads": 1})
    ]
    exact = settings.model_copy(update={"precision": "fp32"})
    assert list(_candidates(exact, [])) == [{"backend": "auto"}, {"backend": "torch"}, {"backend": "compiled"}]
    for taken, left in (("torch", "compiled"), ("compiled", "torch"), ("cpu", "torch")):
        trials = [Trial({"backend": "auto"}, 1.0, 1.0, 1.0, {**execution, "backend": taken})]
        assert list(_candidates(exact, trials))[:2] == [{"backend": "auto"}, {"backend": left}]


def test_what_the_recipe_sets_is_not_varied(recipe: Path, tmp_path: Path) -> None:
    fixed = ['stage.base.loop={ backend = "compiled", threads = 2, micro_batch = 8 }']
    settings = load_graph(recipe, fixed, tmp_path / "runs").nodes["base"].settings
    trials = [Trial({"backend": "compiled"}, 1.0, 9.0, 90.0, {"micro_batch": 8, "threads": 2})]
    expected = [{"precision": "fp32", "backend": "compiled"}, {"backend": "compiled"}]
    assert list(_candidates(settings, trials)) == expected
