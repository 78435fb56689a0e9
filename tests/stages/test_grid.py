"""Every method with an adapter, with EWC, with replay and with all of them, by settings alone; and each of the last
interrupted in the middle of a step. All train stages start from one tiny base model and run in this process."""

import json
import math
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.core.events import VOLATILE, read_events, stable
from ingot.model import lora
from ingot.objectives import rollout
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import child_environment, job_of
from ingot.stages import child
from ingot.stages.models.load import load_model, load_with_adapter
from ingot.stages.training.trace import open_training_data
from ingot.train.engine import Engine
from tests.stages.conftest import RUNS, STEPS

PPO = "epochs = 2, minibatches = 2, kl_target = 1.0, kl_horizon = 16"
METHODS = {
    "lm": ("talk", '"lm"'),
    "reward": ("preferences", '"reward"'),
    "dpo": ("preferences", '"dpo"'),
    "orpo": ("preferences", '{ kind = "dpo", loss = "orpo" }'),
    "kto": ("preferences", '"kto"'),
    "ppo": ("questions", f'{{ kind = "ppo", reward = "rm", max_new = 5, {PPO} }}'),
    "grpo": ("questions", '{ kind = "grpo", reward = "check.py:score", max_new = 5, group = 2, epochs = 2 }'),
    "rloo": ("questions", '{ kind = "grpo", reward = "rm", max_new = 5, group = 3, baseline = "others", beta = 0.1 }'),
    "dr grpo": (
        "questions",
        '{ kind = "grpo", reward = "check.py:score", max_new = 5, group = 2, aggregation = "constant" }',
    ),
}
SAMPLED = ("ppo", "grpo", "rloo", "dr grpo")
SEVERAL = [m for m, (_, objective) in METHODS.items() if "epochs" in objective]
"""Methods with several updates a step."""
LORA, EWC = 'adapter = { kind = "lora", rank = 2 }', 'penalties = [{ kind = "ewc", fisher = "worth", weight = 100.0 }]'
WHOLE = 'adapter = { rank = 2, modules_to_save = ["embedding", "head"] }'
REPLAY = "data = { OWN = 0.6, notes = 0.4 }"
COLUMNS = {
    "plain": (),
    "lora": (LORA,),
    "ewc": (EWC,),
    "replay": (REPLAY,),
    "all": (LORA, EWC, REPLAY),
    "dora": ('adapter = { kind = "dora", rank = 2 }',),
    "whole": (WHOLE,),
    "whole, all": (WHOLE, EWC, REPLAY),
}
pytestmark = pytest.mark.usefixtures("world")
RARE = {"dora": ("ppo",), "whole": ("lm", "dpo", "ppo"), "whole, all": ("lm", "dpo", "ppo")}
CELLS = [(m, c) for m in METHODS for c in COLUMNS if m in RARE.get(c, METHODS)]
STOPPED = [(m, c) for m, c in CELLS if c in ("all", "whole, all")]


def _job_with(*changes: str) -> dict[str, Any]:
    """What the child of a train stage with other settings is told, its other stages done."""
    graph = load_graph(Path("grid.toml"), [f"stage.tuned.{change}" for change in changes], RUNS)
    *before, last = (job_of(graph, node, quiet=True) for node in graph.needed(["tuned"]))
    for job in before:
        child.run(job)  # which returns at once where it is there
    return last


def _run_with(*changes: str) -> Path:
    job = _job_with(*changes)
    child.run(job)
    return Path(job["dir"])


def _job_of(method: str, column: str) -> dict[str, Any]:
    own, objective = METHODS[method]
    more = (change.replace("OWN", own) for change in COLUMNS[column])
    return _job_with(f"objective = {objective}", f"data = {{ {own} = 1.0 }}", *more)


def _run(method: str, column: str, to: str | None = None) -> Path:
    job = _job_of(method, column)
    if to:
        job["dir"] = str((RUNS / "stages" / to).absolute())
    child.run(job)
    return Path(job["dir"])


@cache
def _cell(method: str, column: str) -> Path:
    return _run(method, column)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()}


def _weights(stage: Path) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in load_model(stage, print, device="cpu").model.named_parameters()}


def _steps(stage: Path) -> list[dict[str, Any]]:
    """Step rows, of each step the last attempt's."""
    last = {e["step"]: stable(e) for e in read_events(stage / "metrics.jsonl", "step")}
    return [last[step] for step in sorted(last)]


def _base() -> dict[str, torch.Tensor]:
    graph = load_graph(Path("grid.toml"), [], RUNS)
    return _weights(RUNS / "stages" / graph.nodes["base"].directory)


def _same(straight: Path, stopped: Path) -> None:
    """Two runs of one stage have the same weights, moments, declared state, log and result; the second one went on."""
    assert {e["after"] for e in read_events(stopped / "metrics.jsonl", "resume")} == {2}
    for name in ("best", "00000002", f"{STEPS:08}"):
        one, two = (_tensors(stage / "checkpoints" / name) for stage in (straight, stopped))
        assert one.keys() == two.keys()
        assert all(torch.equal(t, two[n]) for n, t in one.items())
    states = [(s / "checkpoints" / f"{STEPS:08}" / "state.json").read_text() for s in (straight, stopped)]
    assert states[0] == states[1]
    results = [json.loads((stage / "result.json").read_text()) for stage in (straight, stopped)]
    assert {**results[0], **dict.fromkeys(VOLATILE)} == {**results[1], **dict.fromkeys(VOLATILE)}
    assert _steps(straight) == _steps(stopped)


@pytest.mark.parametrize(("method", "column"), CELLS)
def test_every_method_goes_with_every_choice_by_settings_alone(method: str, column: str) -> None:
    stage = _cell(method, column)
    steps, base = _steps(stage), _base()
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["loss" if method in SAMPLED else "loss_nats"])
        assert step["grad_norm"] > 0
    final = _tensors(stage / "checkpoints" / f"{STEPS:08}")
    if column in ("lora", "dora", "all", "whole", "whole, all"):
        model = load_with_adapter(stage, print, device="cpu").model
        beside = dict(model.named_parameters())
        trained = {"embedding.weight", "head.weight"} if "whole" in column else set()
        assert all(bool(p.any()) for n, p in beside.items() if "lora_B" in n)  # which start at 0
        assert {n.removeprefix("model.") for n in final} & base.keys() == trained
        assert not any(torch.equal(beside[n], base[n]) for n in trained)
        frozen = dict(lora.reference(model).named_parameters())
        assert all(torch.equal(p, base[n]) for n, p in frozen.items() if "lora_" not in n and ".frozen" not in n)
    assert any(not torch.equal(w, base[n]) for n, w in _weights(stage).items())
    if column in ("ewc", "all", "whole, all"):
        assert (steps[0]["penalty/ewc"] == 0) == (method not in SEVERAL)
        assert all(step["penalty/ewc"] > 0 for step in steps[1:])
        assert steps[1]["penalty/ewc_grad_norm"] > 0
    if column in ("replay", "all", "whole, all") and method != "lm":
        for step in steps:
            assert 4 < step["replay_nats"] < 7  # of 280 tokens and a model that has seen four steps
            assert 0 < step["replay_fraction"] < 1
    else:
        assert not {"replay", "replay_nats"} & steps[0].keys()


@pytest.mark.parametrize("method", ["lm", "dpo", "ppo"])
def test_2_7_the_tokens_of_both_stores_are_in_the_share_asked_for(method: str) -> None:
    """Within half a per cent over 200 steps, counted in the batches of the stage: of documents, all but their first
    token, of prompts too, whose completions nobody knows before."""
    data, line, _ = open_training_data(_cell(method, "replay"))
    shown = dict.fromkeys(data.names, 0)
    for step in range(1, 201):
        phase, source_B, row_B = line.at(step)
        for s, source in data.train[phase.context].items():
            index, document = source.plan.index(row_B[source_B == s])
            follows = (index[:, 1:] >= 0) & ((document[:, 1:] == document[:, :-1]) | (not source.isolate))
            shown[source.name] += int(follows.sum())
    assert shown["notes"] / sum(shown.values()) == pytest.approx(0.4, abs=0.005)


@pytest.mark.parametrize(
    ("shape", "less"),
    [("clip = 0.5", True), ("clip = 1.0, floor = 10.0", False), ("clip = 1.0, normalise = true", False)],
)
def test_2_7_importances_are_shaped_as_the_settings_say(shape: str, less: bool) -> None:
    penalty = 'penalties = [{{ kind = "ewc", fisher = "worth", weight = 1.0, {} }}]'
    plain, other = (_steps(_run_with(penalty.format(s)))[1]["penalty/ewc"] for s in ("clip = 1.0", shape))
    assert other != plain
    assert (other < plain) == less


def test_2_5_the_reference_is_asked_about_pairs_and_not_about_what_is_replayed() -> None:
    """Also where both are seen whole."""
    stage = _run_with(
        'objective = "dpo"', "data = { preferences = 0.4, notes = 0.6 }", 'duration = "2 epochs"', "batch = 16"
    )
    result = json.loads((stage / "result.json").read_text())
    assert min(result["epochs/preferences"], result["epochs/notes"]) >= 1, result
    assert {p.name for p in (stage / "columns").iterdir()} == {"preferences-train", "preferences-val"}


@pytest.mark.parametrize(("method", "column"), STOPPED)
def test_every_method_goes_on_to_the_bit(method: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapter, EWC and replay: stopped in the middle of a rollout, and again between two updates of a step or
    between the gradient of one and its update."""
    straight, to = _cell(method, column), f"stopped-{method}-{column}".replace(" ", "-").replace(",", "")
    moments = ["rollout", "update"] if method in SAMPLED else ["update"]
    generate, gradients = rollout.generate, Engine.gradients

    def stop(moment: str, step: int, now: bool = True) -> None:
        if step == STEPS and now and moment in moments:
            moments.remove(moment)
            raise InterruptedError

    def generated(*arguments: Any, **options: Any) -> Any:
        found = generate(*arguments, **options)
        stop("rollout", options["step"])
        return found

    def differentiated(self: Engine, batch: Any, inner: int = 0, counts: Any = None) -> Any:
        found = gradients(self, batch, inner, counts)
        stop("update", self.state["step"] + 1, inner == (method in SEVERAL))
        return found

    monkeypatch.setattr(rollout, "generate", generated)
    monkeypatch.setattr(Engine, "gradients", differentiated)
    while moments:
        with pytest.raises(InterruptedError):
            _run(method, column, to)
    stopped = _run(method, column, to)
    _same(straight, stopped)
    assert method != "ppo" or '"beta": 0.05' not in (straight / "checkpoints" / "00000002" / "state.json").read_text()


@pytest.mark.slow
def test_a_child_killed_in_the_middle_of_a_rollout_goes_on_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill -9` while a reward function is asked about the completions of step 3, adaptive KL, adapter and all."""
    own = METHODS["ppo"][1].replace('"rm"', '"check.py:slow"')
    monkeypatch.setitem(METHODS, "ppo by hand", ("questions", own))
    straight, held = _run("ppo by hand", "all"), (RUNS / "stages" / "held").absolute()
    job, hold, signal = _job_of("ppo by hand", "all"), Path("hold"), Path("held")
    hold.touch()
    with subprocess.Popen(
        [sys.executable, "-m", "ingot.stages"], stdin=subprocess.PIPE, env=child_environment(1)
    ) as process:
        assert process.stdin
        process.stdin.write(json.dumps({**job, "dir": str(held)}).encode())
        process.stdin.close()
        while not signal.exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    hold.unlink()
    assert signal.exists()
    assert process.returncode == -9
    assert [p.name for p in (held / "checkpoints").glob("0*")] == ["00000002"]
    assert not (held / "DONE").exists()
    _run("ppo by hand", "all", to="held")
    _same(straight, held)
