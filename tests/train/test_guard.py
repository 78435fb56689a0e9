"""What the guard keeps out of weights and moments, and how a run goes on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import UserError
from ingot.core.events import read_events, stable
from ingot.distributed import checkpoint
from ingot.optim.adam import Adam
from ingot.optim.average import Average
from ingot.optim.optimizers import Optimizer, build
from ingot.optim.settings import OptimSettings
from ingot.stages.training.trace import repair
from ingot.train import guard
from ingot.train.engine import Engine
from ingot.train.guard import DELAY, WINDOW, Guard
from tests.train.test_engine import V, _engine, _run, _text


def breaks_from(engine: Engine, first: int, last: int | None = None) -> Engine:
    """From step `first` on, up to `last`, a gradient is NaN."""

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * math.nan if first <= engine.state["step"] + 1 <= (last or math.inf) else None

    engine.named["norm.weight"].register_hook(hook)
    return engine


def _new(path: Path, kind: str = "adamw", ema: float = 0.0, on: bool = True, **options: Any) -> Engine:
    engine = _engine(path, "fp32", micro=8, log_every=1, save_every=4, **options)
    plan = replace(engine.plan, optim=OptimSettings.model_validate({"kind": kind, "lr": 1e-3, "ema": ema}), guard=on)
    return Engine(engine.model, engine.objective, plan, engine.execution, engine.mesh, path)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_a_gradient_that_is_not_finite_reaches_no_weight_moment_or_average(
    kind: str, tmp_path: Path, make_store
) -> None:
    """The step is logged and counted, the run goes on; the control applies the update, and the weights are lost."""
    source = _text(make_store)
    engine = breaks_from(_new(tmp_path / "a", kind, ema=0.9), 6, 6)
    seen = []
    step = engine.step

    def stepping(raw: Any) -> Any:
        metrics = step(raw)
        seen.append({name: tensor.clone() for name, tensor in engine.training_state.tensors().items()})
        return metrics

    engine.step = stepping  # type: ignore[method-assign]
    lines: list[str] = []
    final = _run(engine, source, tmp_path / "a", notify=lines.append)
    assert all(torch.equal(tensor, seen[4][name]) for name, tensor in seen[5].items())
    assert any(not torch.equal(tensor, seen[5][name]) for name, tensor in seen[6].items())
    assert math.isfinite(final["val_loss_nats"])
    (event,) = read_events(tmp_path / "a" / "metrics.jsonl", "skipped")
    assert (event["step"], event["why"], engine.state["skipped_steps"]) == (6, "the gradient is not finite", 1)
    assert lines == ["step 6: skipped, because the gradient is not finite; `ingot trace` shows its documents"]
    control = breaks_from(_new(tmp_path / "b", kind, on=False), 6)
    with pytest.raises(
        UserError, match=r"step 6: loss .*, gradient norm nan, expected finite numbers; lower optim\.lr"
    ):
        _run(control, source, tmp_path / "b")
    assert any(not bool(torch.isfinite(tensor).all()) for tensor in control.training_state.tensors().values())


def test_a_run_that_is_killed_among_skipped_steps_goes_on_to_the_bit(tmp_path: Path, make_store) -> None:
    source = _text(make_store)
    straight = breaks_from(_new(tmp_path / "a"), 3, 13)
    final = _run(straight, source, tmp_path / "a")
    for stop in (5, 10):
        with pytest.raises(InterruptedError):
            _run(breaks_from(_new(tmp_path / "b"), 3, 13), source, tmp_path / "b", stop_at=stop)
    again = breaks_from(_new(tmp_path / "b"), 3, 13)
    assert _run(again, source, tmp_path / "b") == final
    assert again.state == straight.state
    assert straight.state["skipped_steps"] == 11
    logs = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl")] for x in "ab"]
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1]))


def _parameters(gradient: float) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
    named = {"layers.0.weight": torch.nn.Parameter(torch.ones(3, 4)), "norm.weight": torch.nn.Parameter(torch.ones(5))}
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, gradient)
    return named, build(named, OptimSettings(lr=0.1), 0.1)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_fused_kernel_decides_as_the_host_does(found: float) -> None:
    """What a GPU does without being waited for: weights, moments and the count of steps are those of a skipped step."""
    results = []
    for on_device in (True, False):
        named, optimizer = _parameters(0.5)
        optimizer.step(0.1)
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, math.nan if found else 0.25)
        if on_device:
            (adam,) = optimizer.optimizers
            assert isinstance(adam, Adam)
            assert adam.fused
            adam.step(torch.tensor(2.0), torch.tensor(found))
        else:
            norm = torch.tensor(2.0)
            optimizer.step(0.1, 1.0, norm, torch.tensor(bool(found)))
        results.append([*named.values(), *optimizer.tensors().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results[0])


def test_an_average_on_a_device_moves_as_on_the_host() -> None:
    class OnDevice(torch.Tensor):
        is_cuda = True

    for skipped in (False, True):
        parts = []
        for kind in (torch.Tensor, OnDevice):
            draw = torch.Generator().manual_seed(0)
            named = {"w": torch.nn.Parameter(torch.randn(3, 5, generator=draw))}
            average = Average(named, 0.9)
            before = named["w"].detach().clone()
            named["w"].data.add_(1.0)
            average.update(7, torch.tensor(skipped).as_subclass(kind))
            parts.append(average.tensors()["w"].as_subclass(torch.Tensor))
        assert torch.equal(*parts)
        assert torch.equal(parts[0], before) == skipped


# -- spikes ------------------------------------------------------------------------------------------------------------


def _decide(losses: list[float]) -> list[bool]:
    watched = Guard(True, True, "cpu")
    return [bool(watched.rejects(torch.tensor(loss), torch.tensor(1.0))) for loss in losses]


def test_a_loss_far_above_earlier_ones_is_a_spike_and_noise_is_none() -> None:
    """Healthy chat training has a second mode at 15 times the median (`docs/LOG.md`)."""
    draw = torch.Generator().manual_seed(0)
    noise = (3.0 + 0.3 * torch.randn(400, generator=draw)).tolist()
    assert not any(_decide(noise))
    modes = [3.0 if x < 0.2 else 0.2 for x in torch.rand(400, generator=draw).tolist()]
    assert not any(_decide(modes))
    assert _decide([*noise, 6.0, 3.0, 6.0])[-3:] == [True, False, True]
    assert not any(_decide([0.1] * 200 + [0.5])), "five times as much, and still a small loss"
    assert not any(_decide([*noise[: WINDOW + DELAY - 1], 100.0])), "too few to compare with"


def test_the_loss_of_samples_is_no_spike_and_is_not_compared_with() -> None:
    """On-policy distillation trains on both; the same loss of data is a spike, before and after."""
    watched, norm = Guard(True, True, "cpu"), torch.tensor(1.0)
    assert not any(watched.rejects(torch.tensor(0.2), norm) for _ in range(WINDOW + DELAY))
    for _ in range(2 * (WINDOW + DELAY)):
        assert not watched.rejects(torch.tensor(5.0), norm, sampled=True)
    assert watched.rejects(torch.tensor(5.0), norm)
    assert watched.rejects(torch.tensor(torch.nan), norm, sampled=True)


def test_a_loss_that_climbs_does_not_hide_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4.2 to 115 in 50 steps. Without a delay, each loss is judged by the one before it."""
    climbing = [4.2] * 100 + [4.2 * (115 / 4.2) ** (step / 50) for step in range(1, 51)]
    first = _decide(climbing).index(True)
    assert climbing[first] < 10
    assert all(_decide(climbing)[first:])
    monkeypatch.setattr(guard, "DELAY", 0)
    assert not any(_decide(climbing))


def _bad(raw: Any) -> Any:
    """Rows of ids that no other row has: their loss is more than twice the others'."""
    ids = (raw.ids_BT * 7 + 11) % (V - 8) + 8
    return replace(raw, ids_BT=ids, labels_BT=(ids * 5 + 3) % (V - 8) + 8)


def poison(engine: Engine, first: int, last: int) -> Engine:
    """The rows of some steps are bad."""
    step = engine.step

    def stepping(raw: Any) -> Any:
        return step(_bad(raw) if first <= engine.state["step"] + 1 <= last else raw)

    engine.step = stepping  # type: ignore[method-assign]
    return engine


def wreck(engine: Engine, at: int) -> Engine:
    """The update of a step ruins the weights, which stay finite."""
    update = engine.optimizer.step

    def updating(*arguments: Any) -> None:
        update(*arguments)
        if engine.state["step"] + 1 == at:
            with torch.no_grad():
                engine.named["norm.weight"].mul_(-20)

    engine.optimizer.step = updating  # type: ignore[method-assign]
    return engine


def _long(path: Path, on: bool = True, steps: int = 170, **options: Any) -> Engine:
    engine = _engine(path, "fp32", micro=8, steps=steps, **{"log_every": 1, "save_every": 20, **options})
    plan = replace(engine.plan, evaluate_every=40, guard=on, documents=lambda step: [f"rows of step {step}"])
    return Engine(engine.model, engine.objective, plan, engine.execution, engine.mesh, path)


def _same(a: Engine, b: Engine) -> None:
    for name, tensor in a.training_state.tensors().items():
        if not name.startswith("guard."):
            assert torch.equal(tensor, b.training_state.tensors()[name]), name


def test_rows_that_double_the_loss_for_50_steps_change_nothing(tmp_path: Path, make_store) -> None:
    """The run ends as one that never had them, to the bit; its log names them. The control learns them and is lost."""
    source, lines = _text(make_store), []
    engine = poison(_long(tmp_path / "a"), 115, 164)
    final = _run(engine, source, tmp_path / "a", notify=lines.append)
    without = _long(tmp_path / "b")
    without.state["guard"] = {**without.state["guard"], "left_out": [[115, 164]]}
    assert _run(without, source, tmp_path / "b") == final
    _same(engine, without)
    assert engine.state["skipped_steps"] == 50
    skipped = read_events(tmp_path / "a" / "metrics.jsonl", "skipped")
    assert [e["documents"] for e in skipped] == [[f"rows of step {step}"] for step in range(115, 165)]
    assert all(e["loss_nats"] > 2 * final["val_loss_nats"] for e in skipped)
    told = "skipped, because the loss is far above the largest of 64 steps before"
    assert [repair(tmp_path / "a", step) for step in (114, 115, 164, 165)] == ["", told, told, ""]
    (line,) = lines
    assert line.startswith(
        "step 115: skipped, because the loss is far above the largest of 64 steps before; `ingot trace`"
    )
    lost = _run(poison(_long(tmp_path / "c", on=False), 115, 164), source, tmp_path / "c")
    assert lost["val_loss_nats"] > final["val_loss_nats"] + 0.2


def test_a_phase_may_begin_with_a_higher_loss(tmp_path: Path, make_store) -> None:
    engine = _long(tmp_path, steps=130)
    engine.plan = replace(engine.plan, phases=frozenset({1, 110}))
    _run(poison(engine, 110, 130), _text(make_store), tmp_path)
    assert engine.state["skipped_steps"] == 0


# -- going back --------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter windows, so that a run of 60 steps goes back."""
    for name, value in {"WINDOW": 16, "DELAY": 4, "CALM": 5, "MAX_SKIPPED": 12, "MAX_ROLLBACKS": 2}.items():
        monkeypatch.setattr(guard, name, value)


def _wrecked(path: Path) -> Engine:
    return wreck(_long(path, steps=60, save_every=8), 35)


def _journal(path: Path) -> list[dict[str, Any]]:
    return [stable(e) for e in read_events(path / "metrics.jsonl", "rollback")]


@pytest.mark.usefixtures("short")
def test_a_run_whose_weights_are_ruined_goes_back_before_the_trouble(tmp_path: Path, make_store) -> None:
    """Though every checkpoint since is finite. It ends as one without the steps that are left out, to the bit."""
    source, lines = _text(make_store), []
    engine = _wrecked(tmp_path / "a")
    final = _run(engine, source, tmp_path / "a", notify=lines.append)
    assert engine.state["guard"]["left_out"] == [[32, 47]]
    (entry,) = _journal(tmp_path / "a")
    assert (entry["step"], entry["first"], entry["to"]) == (47, 32, 24)
    assert entry["documents"] == [f"rows of step {step}" for step in range(32, 48)]
    assert "back to step 24, and steps 32 to 47 are left out" in lines[-1]
    told = [repair(tmp_path / "a", step) for step in (31, 32, 47, 48)]
    assert told == ["", *["left out, because the run went back to step 24: " + entry["why"]] * 2, ""]
    without = _long(tmp_path / "b", steps=60)
    without.state["guard"] = {**without.state["guard"], "left_out": [[32, 47]]}
    assert _run(without, source, tmp_path / "b") == final
    _same(engine, without)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_killed_while_it_goes_back_a_run_ends_the_same(
    tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _text(make_store)
    straight = _wrecked(tmp_path / "a")
    final = _run(straight, source, tmp_path / "a")
    for moment in ("in the trouble", "before loading", "before saving", "after saving"):
        path = tmp_path / moment
        killed = _wrecked(path)
        roll_back, save = killed.training_state.roll_back, killed.training_state.save

        def dies_loading(*arguments: Any, moment: str = moment, roll_back: Any = roll_back) -> bool:
            if moment == "before saving":
                roll_back(*arguments)
            raise InterruptedError

        def dies_saved(killed: Engine = killed, save: Any = save) -> None:
            save()
            if killed.state["guard"]["left_out"]:
                raise InterruptedError

        if moment in ("before loading", "before saving"):
            monkeypatch.setattr(killed.training_state, "roll_back", dies_loading)
        elif moment == "after saving":
            monkeypatch.setattr(killed.training_state, "save", dies_saved)
        with pytest.raises(InterruptedError):
            _run(killed, source, path, stop_at=44 if moment == "in the trouble" else None)
        if moment == "in the trouble":
            assert checkpoint.checkpoint_steps(path / "checkpoints") == [40, 32, 24], (
                "none from before would be too few"
            )
        again = _wrecked(path)
        assert _run(again, source, path) == final
        _same(again, straight)
        assert again.state == straight.state
        assert _journal(path) == _journal(tmp_path / "a")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_run_does_not_go_back_for_ever(tmp_path: Path, make_store) -> None:
    source = _text(make_store)
    with pytest.raises(
        UserError, match=r"step 46: .*expected a loss like that of earlier steps, and 12 steps since st"
    ):
        _run(poison(_long(tmp_path / "a", save_every=1000), 35, 10**6), source, tmp_path / "a")
    engine = poison(_long(tmp_path / "b", steps=200, save_every=8), 35, 10**6)
    with pytest.raises(UserError, match=r"the run went back 2 times already; lower optim\.lr"):
        _run(engine, source, tmp_path / "b")
    assert len(_journal(tmp_path / "b")) == 2
    assert read_events(tmp_path / "b" / "metrics.jsonl", "health")[-1]["health"] == "critical"


@pytest.mark.usefixtures("short")
def test_losses_of_another_phase_are_forgotten_where_its_first_step_is_left_out(tmp_path: Path, make_store) -> None:
    """From step 50 on the loss is higher; gradients that are not finite right after send the run back before it."""
    source = _text(make_store)
    engine = _long(tmp_path, steps=100, save_every=8)
    engine.plan = replace(engine.plan, phases=frozenset({1, 50}))
    final = _run(breaks_from(poison(engine, 50, 100), 51, 62), source, tmp_path)
    assert math.isfinite(final["val_loss_nats"])
    assert len(_journal(tmp_path)) == 1
