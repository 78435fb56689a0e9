"""Stages that learn from pairs, as a recipe has them: columns, kills, adapters, penalties, replay; what is refused."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import UserError
from ingot.core.events import VOLATILE, read_events, stable
from ingot.objectives.reward import RewardModel
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import job_of, link
from ingot.plan.machine import cpu
from ingot.stages import child
from ingot.stages.models.load import load_frozen, load_model
from ingot.stages.training.forecast import forecast
from ingot.stages.training.plan_inputs import forecast_inputs
from ingot.stages.training.settings import TrainSettings
from ingot.store.columns import ColumnFiller
from ingot.train.engine import Engine
from tests.objectives.conftest import make_work

RUNS = Path("runs")
BEFORE = ("preferences", "notes", "bpe", "preferences@bpe", "notes@bpe", "base")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory whose recipe has been run up to `tuned`."""
    path, here = make_work(tmp_path_factory.mktemp("prefs"), '"reward"'), Path.cwd()
    os.chdir(path)
    try:
        graph = _graph()
        for name in BEFORE:
            _run(graph, name)
        yield path
    finally:
        os.chdir(here)


def _graph(*overrides: str) -> Graph:
    return load_graph(Path("prefs.toml"), list(overrides), RUNS)


def _run(graph: Graph, name: str = "tuned", to: str | None = None) -> Path:
    node = graph.nodes[name]
    job = job_of(graph, node, quiet=True)
    if to:
        job["dir"] = str((graph.stage(node).path.parent / to).absolute())
    child.run(job)
    link(graph, node)
    return Path(job["dir"])


def _of(objective: str, *overrides: str) -> Graph:
    return _graph(f"stage.tuned.objective={objective}", *overrides)


def _result(stage: Path) -> dict[str, Any]:
    return json.loads((stage / "result.json").read_text())


def _events(stage: Path, name: str) -> list[dict[str, Any]]:
    return [stable(e) for e in read_events(stage / "metrics.jsonl") if e["event"] == name]


def test_2_5_a_dpo_stage_starts_at_ln_2_and_its_margin_grows(work: Path) -> None:
    stage = _run(_of('"dpo"'))
    first, *_, last = _events(stage, "evaluation")
    for split in ("val", "train"):
        assert first[f"{split}_loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
        assert first[f"{split}_rewards/margin"] == pytest.approx(0, abs=1e-6)
    step = _events(stage, "step")[0]
    assert step["rewards/margin"] == pytest.approx(0, abs=1e-6)
    assert step["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["val_rewards/margin"] > 0.1
    assert last["val_rewards/accuracy"] > 0.9
    assert {p.name for p in (stage / "columns").iterdir()} == {"preferences-train", "preferences-val"}
    assert last["val_tokens/chosen"] > 1


def test_2_5_the_reference_is_not_asked_about_rows_that_nobody_will_see(work: Path) -> None:
    """Less than an epoch: what the reference says is computed as rows come, to the same numbers."""
    short = _run(_of('"dpo"', 'stage.tuned.duration="4 steps"', "stage.tuned.optim.decay_steps=12"))
    assert {p.name for p in (short / "columns").iterdir()} == {"preferences-val"}
    whole = _run(_of('"dpo"', "stage.tuned.optim.decay_steps=12"))
    for a, b in zip(_events(short, "step"), _events(whole, "step"), strict=False):
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], abs=1e-6)


def test_2_2_a_reward_stage_keeps_its_scale_and_becomes_a_companion(work: Path) -> None:
    stage = _run(_of('"reward"'))
    result = _result(stage)
    assert result["val_accuracy"] > 0.9
    assert result["val_loss_nats"] < 0.3
    assert {"reward_mean", "reward_std", "calibration_error", "length_correlation"} <= result.keys()
    assert not _events(stage, "sample")  # it has nothing to say
    frozen = load_frozen(stage, print, "cpu", torch.float32)
    assert isinstance(frozen, RewardModel)
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())
    tokenizer = load_model(stage, print, "cpu").tokenizer
    from ingot.tokenizer.chat import render

    def score(answer: str) -> float:
        talk = [{"role": "user", "content": "say cat 3"}, {"role": "assistant", "content": answer}]
        ids = torch.from_numpy(render(talk, tokenizer)[0].astype("int64"))[None]
        return float(frozen.scores(ids, torch.tensor([ids.shape[1]]))[0])

    assert score("please see the cat") == pytest.approx(0, abs=3)  # in units of held-out chosen answers
    assert score("please see the cat") > score("go away cat mill") + 1


@pytest.mark.parametrize(("objective", "released"), [("dpo", True), ("kto", False)])
def test_a_reference_that_only_annotates_is_released_before_the_first_evaluation(
    work: Path, objective: str, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    original = Engine.evaluate

    def load(*arguments: Any) -> Any:
        model = load_frozen(*arguments)
        frozen.append(weakref.ref(model))
        return model

    def evaluate(self: Engine, *arguments: Any) -> Any:
        alive.append(frozen[0]() is not None)
        return original(self, *arguments)

    monkeypatch.setattr("ingot.stages.training.build.load_frozen", load)
    monkeypatch.setattr(Engine, "evaluate", evaluate)
    graph = _of(f'"{objective}"', "stage.tuned.data={ preferences = 0.9, notes = 0.1 }", "stage.tuned.seed=5")
    stage = _run(graph)
    assert alive
    assert set(alive) == {not released}
    node = graph.nodes["tuned"]
    assert isinstance(node.settings, TrainSettings)
    figures = forecast(node.settings, forecast_inputs(node, graph.stage, cpu(), 1, here=False))
    base = load_model(stage, print, "cpu").model
    expected = 0 if released else 4 * sum(p.numel() for p in base.parameters())
    assert figures["memory"]["companions"] == expected


@pytest.mark.parametrize("objective", ['"dpo"', '"reward"', '"kto"'])
def test_D12_a_killed_stage_goes_on_to_the_bit(work: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the reference is read, and again between two checkpoints."""
    graph = _of(objective, 'stage.tuned.duration="9 steps"')
    straight = _run(graph)
    original, put, moments = Engine.step, ColumnFiller.put, ["columns", "steps"]

    def put_or_stop(self: ColumnFiller, *arguments: Any) -> None:
        if "columns" in moments:
            moments.remove("columns")
            raise InterruptedError
        put(self, *arguments)

    def step(self: Engine, raw: Any) -> Any:
        if self.state["step"] == 7 and "steps" in moments:
            moments.remove("steps")
            raise InterruptedError
        return original(self, raw)

    monkeypatch.setattr(ColumnFiller, "put", put_or_stop)
    monkeypatch.setattr(Engine, "step", step)
    for _ in range(1 if objective == '"reward"' else 2):
        with pytest.raises(InterruptedError):
            _run(graph, to="killed")
    killed = _run(graph, to="killed")
    try:
        assert not [m for m in moments if m == "steps"]
        left, right = ({k: v for k, v in _result(s).items() if k not in VOLATILE} for s in (straight, killed))
        assert left == right
        steps = [{e["step"]: json.dumps(e, sort_keys=True) for e in _events(s, "step")} for s in (straight, killed)]
        assert steps[0] == steps[1]
        a, b = (dict(load_model(s, print, "cpu").model.named_parameters()) for s in (straight, killed))
        assert all(torch.equal(a[name], b[name]) for name in a)
    finally:
        shutil.rmtree(killed)


@pytest.mark.parametrize("objective", ['"dpo"', '"reward"', '"kto"', '{ kind = "dpo", loss = "orpo" }'])
def test_adapters_penalties_and_replay_go_with_it_by_settings_alone(work: Path, objective: str) -> None:
    adapted = _run(
        _of(
            objective,
            'stage.tuned.duration="3 steps"',
            "stage.tuned.data={preferences=0.6, notes=0.4}",
            'stage.tuned.adapter={kind="lora", rank=4}',
            'stage.tuned.penalties=[{kind="l2sp", weight=0.1}, {kind="kl", weight=0.1}]',
        )
    )
    first, *_ = _events(adapted, "step")
    assert first["penalty/kl"] == pytest.approx(0, abs=1e-6)
    assert 4 < first["replay_nats"] < 7
    if objective == '"dpo"':
        assert first["rewards/margin"] == pytest.approx(0, abs=1e-6)  # adapters off are the reference
        assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    result = _result(adapted)
    assert math.isfinite(result["val_loss_nats"])
    assert result["val_replay_nats"] < 7
    frozen = load_frozen(adapted, print, "cpu", torch.float32)
    assert isinstance(frozen, RewardModel) == (objective == '"reward"')


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        ('{ kind = "dpo", loss = "simpo", length_norm = false }', 'found length_norm with loss = "simpo", expected it'),
        ('{ kind = "dpo", gamma = 1.0 }', 'found gamma with loss = "sigmoid", expected it with simpo; leave it out'),
        (
            '{ kind = "dpo", loss = "orpo", reference = "base" }',
            'reference with loss = "orpo", expected it with',
        ),
        ('{ kind = "dpo", loss = "ipo", label_smoothing = 0.1 }', "expected it with sigmoid and robust"),
        ('{ kind = "dpo", beta = 0 }', "beta: found 0, expected more than 0"),
        ('{ kind = "dpo", reference = "bse" }', "no stage 'bse'; did you mean 'base'"),
        ('{ kind = "dpo", reference = "bpe" }', "stage 'bpe' is a tokenizer, expected a train or import"),
    ],
)
def test_an_objective_that_does_not_fit_is_said_in_one_sentence(work: Path, objective: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _of(objective)
    assert sentence in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_reference_needs_a_stage_to_start_from_or_a_name(work: Path) -> None:
    recipe = Path("prefs.toml").read_text()
    fresh = recipe.replace('init = "base"', 'tokenizer = "bpe"\nmodel = { depth = 1, width = 16, heads = 1 }')
    Path("fresh.toml").write_text(fresh)
    with pytest.raises(UserError, match="found no reference in objective and no init, expected one; name a trained"):
        load_graph(Path("fresh.toml"), ['stage.tuned.objective="dpo"'], RUNS)
    named = load_graph(Path("fresh.toml"), ['stage.tuned.objective={kind="dpo", reference="base"}'], RUNS)
    assert named.nodes["tuned"].inputs["companion:reference"].name == "base"


OTHER = """
[stage.bpe2]
kind = "tokenizer"
from = "notes"
vocab = 320

[stage.foreign]
kind = "train"
data = { notes = 1.0 }
tokenizer = "bpe2"
model = { depth = 1, width = 16, heads = 1 }
duration = "2 steps"

[stage.tasks]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "prompts"

[stage.policy]
kind = "train"
init = "base"
data = { tasks = 1.0 }
duration = "2 steps"
objective = { kind = "ppo", reward = "REWARD", max_new = 8 }
"""


def test_a_companion_of_other_tokens_and_a_reward_that_is_none_are_refused(work: Path) -> None:
    recipe = Path("prefs.toml").read_text()
    Path("other.toml").write_text(recipe + OTHER.replace("REWARD", "tuned"))
    with pytest.raises(UserError) as error:
        load_graph(Path("other.toml"), ['stage.tuned.objective={kind="dpo", reference="foreign"}'], RUNS)
    assert (
        "stage.tuned: its reference 'foreign' has the tokenizer 'bpe2', expected 'bpe', the tokenizer of this stage"
        in str(error.value)
    )
    load_graph(Path("other.toml"), [], RUNS)  # a reward model is one
    Path("other.toml").write_text(recipe + OTHER.replace("REWARD", "base"))
    with pytest.raises(UserError, match=r"stage.policy: 'base' is not a reward model, expected a train stage"):
        load_graph(Path("other.toml"), [], RUNS)
    reward = recipe.replace('init = "base"', 'tokenizer = "bpe2"\nmodel = { depth = 1, width = 16, heads = 1 }')
    Path("other.toml").write_text(reward + OTHER.replace("REWARD", "tuned"))
    with pytest.raises(UserError, match=r"stage.policy: its reward 'tuned' has the tokenizer 'bpe2', expected 'bpe'"):
        load_graph(Path("other.toml"), [], RUNS)


def test_a_companion_whose_positions_end_before_the_rows_do_is_refused(work: Path) -> None:
    small = '[stage.small]\nkind = "train"\ndata = { notes = 1.0 }\ntokenizer = "bpe"\nduration = "1 steps"\n'
    small += 'model = { family = "gpt2", depth = 1, width = 16, heads = 1, context = 16 }\n'
    Path("other.toml").write_text(Path("prefs.toml").read_text() + small)
    graph = load_graph(Path("other.toml"), ['stage.tuned.objective={kind="dpo", reference="small"}'], RUNS)
    _run(graph, "small")
    with pytest.raises(UserError, match=r"reference: 'small' has 16 learned positions, expected \d+, the"):
        _run(graph)


def test_pairs_beyond_the_context_are_left_out_or_all_refused(work: Path) -> None:
    stage = _run(_of('"reward"', "stage.tuned.context=15", 'stage.tuned.duration="2 steps"'))
    dropped = _result(stage)["dropped_documents"]
    assert 0 < dropped < 64
    with pytest.raises(UserError, match=r"all \d+ pairs have a side longer than the maximum of 6 tokens"):
        _run(_of('"reward"', "stage.tuned.context=6"))


def test_replay_needs_rows_beside_it(work: Path) -> None:
    with pytest.raises(UserError, match="'notes' has format = \"text\", but objective dpo learns from pairs; name a"):
        _of('"dpo"', "stage.tuned.data={notes=1.0}")
    with pytest.raises(
        UserError, match=r"data: found only replayed rows \(notes\) among the 1 rows of step \d+, expected"
    ):
        _run(_of('"dpo"', "stage.tuned.data={preferences=0.1, notes=0.9}", "stage.tuned.batch=1"))
