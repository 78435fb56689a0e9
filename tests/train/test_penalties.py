"""Penalties in the engine: added once however a step is cut, logged apart, resumed to the bit, and in the way of
forgetting only as much as their weight says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingot.core.events import read_events, stable
from ingot.distributed import checkpoint
from ingot.model.transformer import build
from ingot.objectives.replay import Replay
from ingot.optim.grad_terms import Anchor
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine
from ingot.train.penalties import KLPenalty, Penalties
from tests.train.test_engine import _engine, _gradient, _ragged, _run, _text


def _importance(parameter: torch.Tensor, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)


def _with(engine: Engine, ewc: float | None = None, l2sp: float | None = None, kl: float | None = None) -> Engine:
    """The engine with penalties; anchors hold weights of another seed, so that their pull is felt at once."""
    config = engine.model.config
    old = build(config, seed=8, dtype=next(engine.model.parameters()).dtype).requires_grad_(False).eval()
    center = dict(old.named_parameters())
    anchors, losses = [], []
    if ewc is not None:
        anchors.append(Anchor("ewc", ewc, center, {n: _importance(p, n) for n, p in center.items()}))
    if l2sp is not None:
        anchors.append(Anchor("l2sp", l2sp, center))
    if kl is not None:
        losses.append(KLPenalty("kl", kl, old))
    plan = replace(engine.plan, optim=OptimSettings(weight_decay=0.0))
    penalties = Penalties(losses, anchors, lambda: dict(engine.model.named_parameters()))
    where = engine.training_state.checkpoints.parent
    return Engine(engine.model, engine.objective, plan, engine.execution, engine.mesh, where, None, penalties)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_2_7_penalties_count_once_however_the_step_is_cut(tmp_path: Path, precision: str, tolerance: float) -> None:
    batch = _ragged()
    settings = {"ewc": 3.0, "l2sp": 0.5, "kl": 2.0}
    whole = _gradient(_with(_engine(tmp_path, precision, micro=16), **settings), batch)
    values = _with(_engine(tmp_path, precision, micro=16), **settings).gradients(batch)[2]
    for micro in (4, 1):
        engine = _with(_engine(tmp_path, precision, micro=micro), **settings)
        assert (_gradient(engine, batch) - whole).norm() <= tolerance * whole.norm()
        for name, value in engine.gradients(batch)[2].items():
            torch.testing.assert_close(value, values[name], rtol=tolerance, atol=0)
    assert set(values) == {"ewc", "ewc_grad_norm", "l2sp", "l2sp_grad_norm", "kl"}


def test_2_7_the_gradient_is_the_losss_and_the_penalties(tmp_path: Path) -> None:
    """Against autograd of the whole sum, and the reported loss is without them."""
    batch = _ragged()
    plain, engine = _engine(tmp_path), _with(_engine(tmp_path), ewc=3.0, l2sp=0.5, kl=2.0)
    difference = _gradient(engine, batch) - _gradient(plain, batch)
    old = engine.penalties.losses[0].reference  # type: ignore[attr-defined]
    moved = batch.to("cpu")
    out, was = (m(moved.ids_BT, positions_BT=moved.positions_BT) for m in (engine.model, old))
    kept = moved.labels_BT != moved.ignore
    p, q = was.head(was.hidden)[kept].log_softmax(-1), out.head(out.hidden)[kept].log_softmax(-1)
    total = 2.0 * (p.exp() * (p - q)).sum(-1).mean()
    for name, parameter in engine.model.named_parameters():
        away = (parameter - dict(old.named_parameters())[name]).square()
        total = total + 0.5 * (3.0 * _importance(parameter, name) * away).sum() + 0.5 * 0.5 * away.sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(engine.model.parameters()))])
    assert (difference - expected).norm() <= 1e-12 * expected.norm()
    assert engine.gradients(batch)[0] == plain.gradients(batch)[0]


def test_2_7_replayed_rows_are_held_to_nothing(tmp_path: Path) -> None:
    """They are old text: a KL to the old model is of the new rows alone, whatever is replayed beside them."""
    batch = _ragged()
    engine = _with(_engine(tmp_path), kl=2.0)
    engine.replay = Replay()
    alone = engine.gradients(batch)[2]["kl"]
    beside = engine.gradients(replace(batch, replay=replace(batch, replayed=True)))[2]
    assert float(alone) > 0
    torch.testing.assert_close(beside["kl"], alone, rtol=1e-12, atol=0)
    assert float(beside["replay"]) > 0


def test_2_7_weight_zero_is_plain_training_to_the_bit(tmp_path: Path) -> None:
    batches = [_ragged(seed) for seed in range(5)]
    plain, zero = _with(_engine(tmp_path, "fp32")), _with(_engine(tmp_path, "fp32"), ewc=0.0, l2sp=0.0, kl=0.0)
    for batch in batches:
        plain.step(batch)
        zero.step(batch)
    for (name, a), b in zip(
        plain.training_state.tensors().items(), zero.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_2_7_a_large_weight_keeps_the_old_weights(tmp_path: Path) -> None:
    """The distance to theta* after training falls with the weight, to nothing but the last steps' jitter."""

    def distance(weight: float) -> float:
        engine = _engine(tmp_path, "fp32", lr=1e-3, steps=40)
        anchor = Anchor("l2sp", weight, {n: p.detach().clone() for n, p in engine.model.named_parameters()})
        plan = replace(engine.plan, optim=OptimSettings(weight_decay=0.0))
        penalties = Penalties((), (anchor,), lambda: dict(engine.model.named_parameters()))
        made = Engine(engine.model, engine.objective, plan, engine.execution, engine.mesh, tmp_path, None, penalties)
        for seed in range(40):
            made.step(_ragged(seed % 3))
        return (
            sum(float((p.detach() - anchor.center[n]).square().sum()) for n, p in made.model.named_parameters()) ** 0.5
        )

    free, held, fixed = distance(0.0), distance(0.1), distance(1e6)
    assert held < 0.6 * free
    assert fixed < 0.1 * free


def test_D12_a_run_with_penalties_resumes_to_the_bit(tmp_path: Path, make_store) -> None:
    source = _text(make_store)

    def engine(name: str) -> Engine:
        made = _engine(tmp_path / name, "fp32", micro=4, log_every=1, save_every=4)
        return _with(made, ewc=1.0, l2sp=0.1, kl=0.5)

    straight = engine("a")
    final = _run(straight, source, tmp_path / "a")
    for stop in (3, 10):
        with pytest.raises(InterruptedError):
            _run(engine("b"), source, tmp_path / "b", stop_at=stop)
    again = engine("b")
    assert _run(again, source, tmp_path / "b") == final
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl")] for x in "ab"]
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1]))
    (step, *_) = read_events(tmp_path / "a" / "metrics.jsonl", "step")
    assert {"loss_nats", "ewc", "ewc_grad_norm", "l2sp", "kl", "grad_norm"} <= set(step)
    assert checkpoint.checkpoint_steps(tmp_path / "a" / "checkpoints")[0] == 20
