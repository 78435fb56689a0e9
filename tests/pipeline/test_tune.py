"""`ingot tune`: turns, a budget, no choice on a busy machine, by a clock that the tests move; and on a real stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.gc import orphans
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import run
from ingot.pipeline.tune import Candidate, Decision, Trial, _candidates, decide, tune
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


class Machine:
    """A machine with a clock of its own: `step_s` by backend, a start of 2 s, and noise that the test sets."""

    def __init__(self, step_s: dict[str, float], noise: list[float] | None = None, start_s: float = 2.0):
        self.now, self.step_s, self.noise, self.start_s = 100.0, step_s, iter(noise or []), start_s
        self.measured: list[str] = []

    def measure(self, candidate: Candidate, seconds: float) -> Trial | None:
        step_s = self.step_s[candidate["backend"]] * next(self.noise, 1.0)
        needed = self.start_s + 30 * step_s
        self.now += min(needed, seconds)
        self.measured.append(candidate["backend"])
        total_s = self.start_s + 1000 * step_s
        return Trial(candidate, step_s, self.start_s, total_s, {}) if needed <= seconds else None

    def decide(self, *candidates: str) -> Decision:
        rows = ({"backend": name} for name in candidates)
        return decide("base", rows, [], self.measure, lambda _: None, lambda: self.now)


def test_candidates_are_compared_in_turns_within_a_minute() -> None:
    machine = Machine({"auto": 0.1, "torch": 0.12, "compiled": 0.08})
    decision = machine.decide("auto", "torch", "compiled")
    assert machine.measured == ["auto", "torch", "compiled", *["auto", "compiled"] * 3]
    assert machine.now - 100 <= 60
    assert decision.winner is not None
    assert decision.winner.candidate == {"backend": "compiled"}
    assert decision.reason == "backend compiled takes 20 % less time than the default"


def test_nothing_is_chosen_on_a_busy_machine() -> None:
    """The same speeds as above, and a neighbour that slows some measurements down by 40 %."""
    machine = Machine({"auto": 0.1, "torch": 0.12, "compiled": 0.08}, [1, 1, 1, 1.4, 1, 1, 1.4, 1, 1])
    decision = machine.decide("auto", "torch", "compiled")
    assert decision.winner is None
    assert "repetitions of one setting differ by" in decision.reason
    assert "too busy to tell; the default stays" in decision.reason


def test_the_budget_holds_whatever_the_stage_costs() -> None:
    slow = Machine({"auto": 0.5, "torch": 0.4, "compiled": 0.3})
    decision = slow.decide("auto", "torch", "compiled")
    assert slow.now - 100 <= 60
    assert decision.winner is None
    assert decision.reason.startswith("the default is the fastest of 1 candidates") or "twice" in decision.reason
    fast = Machine({"auto": 0.1, "torch": 0.12})
    assert fast.decide("auto", "torch").reason == "the default is the fastest of 2 candidates and stays"
    assert fast.measured == ["auto", "torch"], "nothing is left to decide"
    with pytest.raises(UserError, match="base: found fewer than 3 steps in 30 s with the default settings"):
        Machine({"auto": 10.0}).decide("auto")


@pytest.mark.slow
def test_run_begins_with_the_winner(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are measured for real; the decision is fixed, so that the machine's load does not matter."""
    candidates = [{"backend": "torch"}, {"backend": "torch", "micro_batch": 2}]
    monkeypatch.setattr("ingot.pipeline.tune._candidates", lambda settings, trials: iter(candidates))

    def second_wins(stage: str, candidates: Any, trials: list[Trial], measure: Any, notify: Any) -> Decision:
        trials += filter(None, (measure(candidate, 300.0) for candidate in candidates))
        return Decision(trials, trials[1], "fixed")

    monkeypatch.setattr("ingot.pipeline.tune.decide", second_wins)
    decision, path = tune(recipe, [], "base", tmp_path / "runs", 5, print)
    assert [t.candidate for t in decision.trials] == candidates
    assert all(0 < t.step_s < t.start_s < t.total_s for t in decision.trials)
    assert path is not None
    chosen = json.loads(path.read_text())
    assert chosen["micro_batch"] == 2
    assert path.parent not in {o.path for o in orphans(tmp_path / "runs")}, "it waits for the run"

    graph = load_graph(recipe, [], tmp_path / "runs")
    run(graph, ["base"], lambda *_: None, quiet=True)
    began = json.loads((graph.stage(graph.nodes["base"]) / "execution.json").read_text())
    assert began == chosen
    with pytest.raises(
        UserError, match=r"base: found a stage that has run already .*, expected one that has not started"
    ):
        tune(recipe, [], "base", tmp_path / "runs", 5, print)


@pytest.mark.slow
def test_a_stage_of_too_few_steps_says_so(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base: found 2 steps, expected 3 or more"):
        tune(recipe, ['stage.base.duration="2 steps"'], "base", tmp_path / "runs", 5, lambda _: None)


def test_only_a_train_stage_is_tuned(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage: found 'chars', expected a train stage of the recipe: base"):
        tune(recipe, [], "chars", tmp_path / "runs", 5, print)


def test_candidates_begin_with_the_default_and_vary_the_best(recipe: Path, tmp_path: Path) -> None:
    settings = load_graph(recipe, [], tmp_path / "runs").nodes["base"].settings
    assert isinstance(settings, TrainSettings)
    execution = {"micro_batch": 8, "threads": 2, "backend": "cpu", "precision": "bf16"}
    trials = [
        Trial({"backend": "auto"}, 1.0, 9.0, 90.0, execution),
        Trial({"backend": "torch"}, 2.0, 3.0, 80.0, execution),
    ]
    assert list(_candidates(settings, trials)) == [
        {"backend": "auto"},
        {"backend": "torch"},
        {"backend": "compiled"},
        {"precision": "fp32", "backend": "torch"},
        *({"backend": "torch", **more} for more in ({"micro_batch": 4}, {"micro_batch": 2}, {"threads": 1})),
    ]
    assert list(_candidates(settings, [])) == [{"backend": "auto"}], "nothing to vary if the default fails"
    for chosen, other in (("torch", "compiled"), ("compiled", "torch")):
        trials = [Trial({"backend": "auto"}, 1.0, 1.0, 1.0, {**execution, "backend": chosen, "precision": "fp32"})]
        varied = {"backend": "auto", "micro_batch": 4}
        assert list(_candidates(settings, trials))[:3] == [{"backend": "auto"}, {"backend": other}, varied]


def test_what_the_recipe_sets_is_not_varied(recipe: Path, tmp_path: Path) -> None:
    fixed = ['stage.base.loop={ backend = "compiled", threads = 2, micro_batch = 8 }']
    settings = load_graph(recipe, fixed, tmp_path / "runs").nodes["base"].settings
    execution = {"micro_batch": 8, "threads": 2, "backend": "compiled", "precision": "bf16"}
    trials = [Trial({"backend": "compiled"}, 1.0, 9.0, 90.0, execution)]
    assert list(_candidates(settings, trials)) == [
        {"backend": "compiled"},
        {"precision": "fp32", "backend": "compiled"},
    ]
