"""What the loss of a step is made of: labels, penalties beside the reported loss, and draws that repeat."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ingot.core.events import read_events
from ingot.data.batches import IGNORE, Source, all_rows, make_batch
from ingot.data.packing import BestFit, Concatenated
from ingot.model.lm_head import LMHead
from ingot.model.losses import cross_entropy
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.objectives.settings import LanguageModelSettings
from ingot.stages.models.load import build_objective
from ingot.stages.training.settings import TrainSettings
from ingot.train.engine import Engine
from tests.train.test_engine import T, V, _engine, _gradient, _ragged, _run, _text


def _with(engine: Engine, **options: float) -> Engine:
    engine.objective = LanguageModel(LanguageModelSettings(**options))
    return engine


def test_D1_targets_of_a_row(make_store) -> None:
    """T + 1 ids give T targets, and a sequence of T tokens gives T - 1."""
    window = make_store([list(range(T + 1))], vocab=V)
    (batch,) = all_rows(Source("s", window, Concatenated(np.asarray(window.ends), T), False), 1)
    assert batch.counts()["token"] == T
    document = make_store([list(range(T))], vocab=V)
    (batch,) = all_rows(Source("s", document, BestFit(np.asarray(document.ends), T), True), 1)
    assert batch.counts()["token"] == T - 1


def test_D1_source_error_labels_shifted_twice(make_store) -> None:
    """002 shifts in get_batch and again in the loop, and so trains on the token after next.

    An oracle that knows the next token of a stream (i -> 5 i + 3 mod V) has no loss on our labels; on labels shifted
    once more it is certain of the wrong token, and the label two places on is what they ask for.
    """
    stream = [0]
    for _ in range(400):
        stream.append((5 * stream[-1] + 3) % V)
    store = make_store([stream], vocab=V)
    source = Source("s", store, Concatenated(np.asarray(store.ends), T), isolate=False)
    batch = make_batch([source], np.zeros(4, int), np.arange(4)).to("cpu")

    oracle = LMHead(50.0 * F.one_hot((5 * torch.arange(V) + 3) % V, V).T.float())
    ids = F.one_hot(batch.ids_BT, V).float()
    ours, n = cross_entropy(ids, oracle, batch.labels_BT)
    assert ours / n < 1e-6
    assert torch.equal(batch.labels_BT[:, :-1], batch.ids_BT[:, 1:])
    twice = torch.full_like(batch.labels_BT, IGNORE)
    twice[:, :-1] = batch.labels_BT[:, 1:]
    theirs, n = cross_entropy(ids, oracle, twice)
    assert theirs / n > 40
    assert torch.equal(twice[:, :-2], batch.ids_BT[:, 2:])


def test_D15_source_error_the_logged_loss_divided_by_the_accumulation(tmp_path: Path) -> None:
    """003 logs the last micro-batch's loss after dividing it by their number k: about ln V / k at the first step."""
    batch = _ragged()
    kept = replace(batch, labels_BT=np.random.default_rng(1).integers(0, V, batch.labels_BT.shape))
    engine = _engine(tmp_path, micro=4)
    micros = list(kept.micro_batches(4))
    theirs = float(engine.gradients(micros[-1])[0]) / len(micros)
    ours = float(engine.step(kept).loss)
    assert ours == pytest.approx(math.log(V), abs=0.05)
    assert theirs == pytest.approx(math.log(V) / 4, abs=0.05)


# -- label smoothing and z-loss --------------------------------------------------------------------------------------


def _reference(engine: Engine, batch, smoothing: float, z: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over labelled tokens from whole logits, by torch's own functions, and its gradient."""
    b = batch.to("cpu")
    out = engine.model(b.ids_BT, positions_BT=b.positions_BT)
    kept = b.labels_BT != IGNORE
    logits = out.head(out.hidden)[kept]
    loss = F.cross_entropy(logits, b.labels_BT[kept], label_smoothing=smoothing)
    loss = loss + z * torch.logsumexp(logits, -1).square().mean()
    return loss, torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(engine.trained.values()))])


@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("micro", [16, 3])
def test_D1_the_gradient_of_smoothing_and_z_loss(tmp_path: Path, smoothing: float, z: float, micro: int) -> None:
    engine, batch = _with(_engine(tmp_path, micro=micro), label_smoothing=smoothing, z_loss=z), _ragged()
    loss, right = _reference(engine, batch, smoothing, z)
    found = _gradient(engine, batch)
    assert (found - right).norm() <= 1e-12 * right.norm()
    reported, _, penalties = engine.gradients(batch)
    assert float(reported) + sum(map(float, penalties.values())) == pytest.approx(loss.item(), rel=1e-12)
    assert float(reported) == pytest.approx(_reference(engine, batch, 0, 0)[0].item(), rel=1e-12)
    assert set(penalties) == {n for n, v in (("label_smoothing", smoothing), ("z_loss", z)) if v}


def test_D1_at_zero_nothing_changes_to_the_bit(tmp_path: Path) -> None:
    batch = _ragged()
    plain = _engine(tmp_path, "fp32")
    zero = _with(_engine(tmp_path, "fp32"), label_smoothing=0.0, z_loss=0.0)
    assert plain.gradients(batch)[0] == zero.gradients(batch)[0]
    assert torch.equal(_gradient(plain, batch), _gradient(zero, batch))
    assert set(zero.gradients(batch)[2]) == set()


def test_D1_penalties_do_not_leak_into_any_reported_loss(tmp_path: Path, make_store) -> None:
    """Step and validation losses are plain cross-entropy; the penalties stand beside them under their names."""
    source, batch = _text(make_store), _ragged()
    plain = _engine(tmp_path, "fp64")
    heavy = _with(_engine(tmp_path, "fp64"), label_smoothing=0.5, z_loss=1.0)
    assert heavy.evaluate([batch])[0] == pytest.approx(plain.evaluate([batch])[0], rel=1e-12)
    heavy = _with(_engine(tmp_path / "b", "fp32", micro=8, steps=2, log_every=1), label_smoothing=0.1, z_loss=1e-3)
    _run(heavy, source, tmp_path / "b")
    first, *_ = read_events(tmp_path / "b" / "metrics.jsonl", "step")
    assert first["loss_nats"] == pytest.approx(math.log(V), abs=0.05)
    assert first["z_loss"] == pytest.approx(1e-3 * math.log(V) ** 2, rel=0.1)  # small logits: ln Z is ln V
    assert first["label_smoothing"] == pytest.approx(0, abs=5e-3)  # a nearly uniform model loses nothing


def test_the_recipe_reaches_the_objective() -> None:
    table = {"kind": "lm", "label_smoothing": 0.1, "z_loss": 1e-4}
    stage = TrainSettings.model_validate(
        {"data": {"a": 1.0}, "duration": "5 steps", "tokenizer": "t", "model": {"depth": 2}, "objective": table}
    )
    objective = build_objective(stage.objective)
    assert isinstance(objective, LanguageModel)
    assert (objective.label_smoothing, objective.z_loss) == (0.1, 1e-4)


def test_z_loss_pulls_the_normaliser_to_one(tmp_path: Path, make_store) -> None:
    """The proof that it does what it is for, with its control: ln Z stays near ln V without it."""
    (batch,) = all_rows(_text(make_store), 100)
    found = {}
    for z in (0.0, 0.1):
        engine = _with(_engine(tmp_path / str(z), "fp32", micro=80), z_loss=z)
        for _ in range(20):
            engine.step(batch)
        b = batch.to("cpu")
        out = engine.model(b.ids_BT)
        found[z] = torch.logsumexp(out.head(out.hidden), -1).abs().mean().item()
    assert found[0.1] < 0.5 * found[0.0]


# -- random draws ----------------------------------------------------------------------------------------------------


def _dropping(engine: Engine) -> Engine:
    """The same engine over a model with dropout."""
    config = engine.model.config.model_copy(update={"dropout": 0.3})
    model = build(config, seed=3, dtype=engine.execution.parameter_dtype)
    path = engine.training_state.checkpoints.parent
    return Engine(model, engine.objective, engine.plan, engine.execution, engine.mesh, path)


def test_D12_with_dropout_a_resumed_run_draws_the_same(tmp_path: Path, make_store) -> None:
    source, options = _text(make_store), {"precision": "fp32", "micro": 4, "steps": 8, "save_every": 3}
    straight = _dropping(_engine(tmp_path / "a", **options))
    final = _run(straight, source, tmp_path / "a")
    with pytest.raises(InterruptedError):
        _run(_dropping(_engine(tmp_path / "b", **options)), source, tmp_path / "b", stop_at=5)
    torch.manual_seed(99)  # another process's generator
    again = _dropping(_engine(tmp_path / "b", **options))
    assert _run(again, source, tmp_path / "b") == final
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_draws_differ_by_step_micro_batch_update_and_seed(tmp_path: Path) -> None:
    batch = _ragged()
    engine = _dropping(_engine(tmp_path, micro=16))
    first = _gradient(engine, batch)
    assert torch.equal(_gradient(engine, batch), first)
    split = _dropping(_engine(tmp_path, micro=8))
    assert not torch.allclose(_gradient(split, batch), first)  # invariance to the split is promised without dropout
    engine.gradients(batch, inner=1)
    assert not torch.allclose(torch.cat([p.grad.flatten() for p in engine.trained.values()]), first)
    engine.state["step"] = 1
    assert not torch.allclose(_gradient(engine, batch), first)
    engine.state["step"] = 0
    engine.plan = replace(engine.plan, seed=2)
    assert not torch.allclose(_gradient(engine, batch), first)
