"""What an objective may ask of the engine: columns, taps, modules, and models run over all rows of a batch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ingot.data.batches import Batch, Source, all_rows
from ingot.data.packing import BestFit, Concatenated
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.objectives.replay import Replay
from ingot.stages.training.reference_columns import add_columns
from ingot.train.engine import Engine
from ingot.train.execution import Execution
from ingot.train.objective import Column, Context, Needs, Objective, Term
from ingot.train.runner import Runner
from tests.train.test_engine import B, T, V, _engine, _gradient, _ragged


def _with(objective: Objective, path: Path, precision: str = "fp64", micro: int = B, **options: Any) -> Engine:
    """An engine whose companion "teacher" is a model of another seed."""
    plain = _engine(path, precision, micro, **options)
    teacher = build(plain.model.config, seed=9, dtype=plain.execution.parameter_dtype).eval().requires_grad_(False)
    return Engine(plain.model, objective, plain.plan, plain.execution, Mesh(), path, {"teacher": teacher})


# -- columns -----------------------------------------------------------------------------------------------------------


class _Taught(Objective):
    """Learns a teacher's first three logits at every label by the squared error."""

    needs = Needs(columns=(Column("t", per="token", width=3), Column("rows")), companions_after_annotate=False)

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        logits_BT3 = ctx.over(ctx.companions["teacher"], batch, lambda out, rows: out.logits[..., :3])
        return {"t": logits_BT3.cpu(), "rows": torch.arange(len(batch)).double()}

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        assert batch.columns["rows_B"].shape == (len(batch),)
        error_BT = (out.logits[..., :3] - batch.columns["t_BT"].to(out.hidden.dtype)).square().sum(-1)
        labelled_BT = batch.labels_BT != batch.ignore
        return {"error": Term(error_BT[labelled_BT].sum(), "token")}


def test_an_objective_trains_on_columns_per_token_that_are_computed_as_rows_come(tmp_path: Path) -> None:
    batch = _ragged()
    engine = _with(_Taught(), tmp_path, micro=4)
    (annotated,) = engine._expand(batch, engine.context(1))
    assert annotated.columns["t_BT"].shape == (B, T, 3)
    ready = batch.to("cpu")
    with torch.no_grad():
        right = engine.companions["teacher"](ready.ids_BT).logits[..., :3]
        student = engine.model(ready.ids_BT).logits[..., :3]
    kept = ready.labels_BT != batch.ignore
    expected = right * kept[..., None]  # 0 without a label, as in the columns of a store
    torch.testing.assert_close(annotated.columns["t_BT"], expected, rtol=1e-12, atol=1e-12)
    first = engine.step(batch)
    assert float(first.loss) == pytest.approx(float((student - right).square().sum(-1)[kept].mean()), rel=1e-10)
    for _ in range(19):
        last = engine.step(batch)
    assert float(last.loss) < 0.5 * float(first.loss)
    assert engine.evaluate([batch])[0] < 0.5 * float(first.loss)


@pytest.mark.parametrize("micro", [1, 4, 16])
def test_columns_that_a_batch_has_are_read_and_the_companion_is_not_asked(tmp_path: Path, micro: int) -> None:
    batch = _ragged()
    asked = _with(_Taught(), tmp_path, micro=16)
    (annotated,) = asked._expand(batch, asked.context(1))
    silent = _with(_Taught(), tmp_path, micro=micro)
    silent.companions = {}
    loss = float(asked.step(batch).loss)
    assert float(silent.step(annotated).loss) == pytest.approx(loss, rel=1e-12)


class _TaughtByToken(_Taught):
    """The same without the column per document, for rows of several documents."""

    needs = Needs(columns=(Column("t", per="token", dtype="<f8", width=3),))

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return {"t": super().annotate(batch, ctx)["t"]}

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        return super().loss(out, replace(batch, columns={**batch.columns, "rows_B": batch.row_B}), ctx)


@pytest.mark.parametrize("plan", [Concatenated, BestFit])
def test_columns_of_a_store_are_those_that_are_computed_as_rows_come(tmp_path: Path, make_store, plan) -> None:
    """Written once for all rows in the order of the row plan, read beside the labels: the same gradient."""
    draw = np.random.default_rng(4)
    store = make_store([draw.integers(0, V, n).tolist() for n in draw.integers(3, 12, 30)], vocab=V)
    source = Source("s", store, plan(np.asarray(store.ends), T), isolate=True)
    engine = _with(_TaughtByToken(), tmp_path)
    (bare,) = all_rows(source, 1000)
    right = _gradient(engine, next(engine._expand(bare, engine.context(1))))
    done: list[int] = []
    add_columns(engine.objective.needs.columns, engine.annotate, engine.mesh, source, tmp_path / "columns", done.append)
    assert sum(done) == source.plan.rows
    engine.companions = {}
    (stored,) = all_rows(source, 1000)
    labelled = stored.labels_BT != stored.ignore
    assert labelled.any()
    assert stored.columns["t_BT"][labelled].any(-1).all()
    assert not stored.columns["t_BT"][~labelled].any(), "0 where there is no label"
    assert next(engine._expand(stored, engine.context(1))) is stored
    assert (_gradient(engine, stored) - right).norm() <= 1e-12 * right.norm()


# -- models over all rows ----------------------------------------------------------------------------------------------


def _runner(micro: int) -> Runner:
    return Runner(Execution("cpu", "fp64", 1, micro, "test", context=T))


@pytest.mark.parametrize("micro", [1, 3, 5, 16, 100])
def test_what_a_runner_reads_is_that_of_one_pass(tmp_path: Path, micro: int) -> None:
    """Rows keep their order, whatever the micro-batch; nothing is kept for a backward pass."""
    batch, model, sizes = _ragged(), _engine(tmp_path).model, []

    def read(out: Any, rows: Batch) -> Tensor:
        sizes.append(len(rows))
        return torch.stack((out.logits[..., 0], rows.labels_BT.double()), -1)

    found = _runner(micro).run(model, batch, read)
    ready = batch.to("cpu")
    assert found.shape == (B, T, 2)
    torch.testing.assert_close(found[..., 0], model(ready.ids_BT).logits[..., 0].detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(found[..., 1], ready.labels_BT.double())
    assert not found.requires_grad
    assert max(sizes) == min(micro, B)
    assert sum(sizes) == B


def test_a_runner_reads_more_of_shorter_rows_at_once_and_never_splits_a_pair(tmp_path: Path) -> None:
    batch, model, sizes = _ragged(), _engine(tmp_path).model, []

    def read(out: Any, rows: Batch) -> Tensor:
        sizes.append(len(rows))
        return rows.row_B

    short = replace(batch, ids_BT=batch.ids_BT[:, :4], labels_BT=batch.labels_BT[:, :4])
    assert _runner(4).run(model, short, read).tolist() == list(range(B))
    assert sizes == [12, 4]
    sizes.clear()
    assert _runner(5).run(model, replace(batch, group=2), read).tolist() == list(range(B))
    assert sizes == [4, 4, 4, 4]


@pytest.mark.parametrize("micro", [16, 3])
def test_over_returns_taps(tmp_path: Path, micro: int) -> None:
    engine, batch = _engine(tmp_path, micro=micro), _ragged()
    names = ("hidden.0", "hidden.1", "attention.1")
    ctx, ready = engine.context(1), batch.to("cpu")
    right = engine.model(ready.ids_BT, taps=frozenset(names)).taps
    for name in names:
        found = ctx.over(engine.model, batch, lambda out, rows, name=name: out.taps[name], taps=frozenset({name}))
        torch.testing.assert_close(found, right[name].detach(), rtol=1e-12, atol=1e-12)
    assert not ctx.over(engine.model, batch, lambda out, rows: torch.tensor([len(out.taps)])).any()


class _Tapping(LanguageModel):
    """Pulls the stream of the first block to 0 beside the loss."""

    needs = Needs(taps=frozenset({"hidden.1"}))

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        pull = Term(out.taps["hidden.1"].square().sum(), "sequence", 1e-3, penalty=True)
        return {**super().loss(out, batch, ctx), "pull": pull}


def test_the_taps_of_an_objective_reach_its_loss_and_not_that_of_replayed_rows(tmp_path: Path) -> None:
    batch, plain = _ragged(), _engine(tmp_path, micro=4)
    engine = _with(_Tapping(), tmp_path, micro=4)
    engine.replay = Replay()
    tapped: list[int] = []
    engine.model.register_forward_hook(lambda _, inputs, out: tapped.append(len(out.taps)))
    _, counts, others = engine.gradients(replace(batch, replay=replace(batch, replayed=True)))
    assert tapped == [1] * 4 + [0] * 4
    ready = batch.to("cpu")
    stream = plain.model(ready.ids_BT, taps=frozenset({"hidden.1"})).taps["hidden.1"]
    assert float(others["pull"]) == pytest.approx(
        1e-3 * float(stream.detach().square().sum()) / counts["sequence"], rel=1e-10
    )
    assert engine.evaluate([batch])[0] == pytest.approx(plain.evaluate([batch])[0], rel=1e-12)


# -- modules -----------------------------------------------------------------------------------------------------------


class _Probing(LanguageModel):
    """Trains a linear probe of the hidden states beside the model."""

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"probe": nn.Linear(32, 1)}

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        error_B = (ctx.modules["probe"](out.hidden.detach())[..., 0].mean(1) - 3).square()
        return {**super().loss(out, batch, ctx), "probe": Term(error_B.sum(), "sequence")}


def test_modules_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    batch, objective = _ragged(), _Probing()
    engine = _with(objective, tmp_path, "fp32", micro=4)
    probe = engine.modules["probe"]
    before = probe.weight.detach().clone()
    for _ in range(3):
        engine.step(batch)
    assert not torch.equal(probe.weight, before)
    names = {f"extra.probe.{name}" for name in ("weight", "bias")}
    assert names <= set(engine.trained)
    tensors = engine.training_state.tensors()
    assert {f"model.{name}" for name in names} <= set(tensors)
    assert any(name.startswith("optim.extra.probe.weight.") for name in tensors)
    engine.training_state.save()
    engine.training_state.save_best()
    again = _with(objective, tmp_path, "fp32", micro=4)
    assert torch.equal(again.modules["probe"].weight, before), "the same seed gives the same start"
    assert again.modules["probe"] is not probe, "an objective makes new modules for each engine and keeps none"
    assert again.training_state.resume(lambda message: None)
    for name, value in again.training_state.tensors().items():
        assert torch.equal(value, tensors[name]), name
    assert torch.equal(again.context(0).modules["probe"].weight, probe.weight)
    best = {f"model.{name}": torch.empty_like(engine.named[name]) for name in names}
    checkpoint.load(tmp_path / "checkpoints" / "best", best)
    assert torch.equal(best["model.extra.probe.weight"], probe.weight)
    assert float(engine.step(batch).loss) == float(again.step(batch).loss), "moments go on too"


def test_modules_have_the_precision_of_the_parameters(tmp_path: Path) -> None:
    for precision, dtype in (("fp64", torch.float64), ("bf16", torch.float32)):
        assert _with(_Probing(), tmp_path, precision).modules["probe"].weight.dtype == dtype


@pytest.mark.parametrize("micro", [4, 1])
def test_the_gradient_of_modules_is_the_same_however_a_step_is_cut(tmp_path: Path, micro: int) -> None:
    batch = _ragged()
    complete = _gradient(_with(_Probing(), tmp_path), batch)
    assert (_gradient(_with(_Probing(), tmp_path, micro=micro), batch) - complete).norm() <= 1e-12 * complete.norm()


# -- expand ------------------------------------------------------------------------------------------------------------


class _Twice(LanguageModel):
    """Two updates of a step; the second is decided by the weights that the first one left."""

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        first = self._weight(ctx)
        yield batch
        assert self._weight(ctx) != first
        yield batch

    def _weight(self, ctx: Context) -> float:
        assert not torch.is_grad_enabled()
        return float(ctx.model.norm.weight.sum())  # type: ignore[union-attr, operator]


def test_expand_runs_between_updates_and_without_gradients(tmp_path: Path) -> None:
    engine = _with(_Twice(), tmp_path)
    metrics = engine.step(_ragged())
    assert metrics.tokens == 2 * _ragged().counts()["token"]
    assert torch.is_grad_enabled()


def test_the_context_sums_over_ranks(tmp_path: Path) -> None:
    class Alike(Mesh):
        def sum(self, tensor: Tensor) -> Tensor:
            return tensor * self.size

    engine = _engine(tmp_path)
    engine.mesh = Alike(0, 3)
    assert engine.context(1).sum_over_ranks(torch.ones(2)).tolist() == [3.0, 3.0]
