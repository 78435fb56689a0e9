"""One step, by row of the specification: padding, masks, ranks, the logged norm, the best weights."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from ingot.core.events import EventLog
from ingot.data.batches import Loader, Source, all_rows, make_batch
from ingot.data.packing import BestFit, Concatenated
from ingot.data.sampler import Order
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.model.losses import token_logps
from ingot.optim.settings import OptimSettings
from ingot.train.loop import train
from tests.imports import assert_not_imported
from tests.train.test_engine import T, V, _engine, _gradient, _ragged, _text


def _ends(lengths):
    return np.cumsum(lengths).astype(np.uint64)


@pytest.mark.parametrize("isolate", [False, True])
def test_C5_padded_positions_contribute_exactly_nothing(tmp_path, make_store, isolate):
    store = make_store([[1, 2, 3], [4, 5, 6, 7]], vocab=V)
    found = []
    for pad in (0, 30):
        source = Source("s", store, BestFit(np.asarray(store.ends), T), isolate, pad)
        (batch,) = all_rows(source, 8)
        engine = _engine(tmp_path, "fp32")
        found.append((engine.gradients(batch)[0], _gradient(engine, batch)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_C5_the_ignore_index_changes_no_number(tmp_path, make_store):
    """-100 or -1: the same counts, and the same loss and gradient to the bit."""
    store = make_store([[1, 2, 3], [4, 5, 6, 7]], masks=[[0, 1, 1], [0, 0, 1, 1]], vocab=V)
    found = []
    for ignore in (-100, -1):
        source = Source("s", store, BestFit(np.asarray(store.ends), T), True, 0, ignore)
        (batch,) = all_rows(source, 8)
        assert (batch.labels_BT == ignore).sum() == T - 4
        engine = _engine(tmp_path, "fp32", micro=1)
        found.append((batch.counts(), engine.gradients(batch)[0], _gradient(engine, batch)))
    assert found[0][0] == found[1][0] == {"token": 4, "sequence": 1}
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2])


def test_C5_source_error_padding_with_labels(tmp_path, make_store):
    """001 pads and never sets -100, so the pad id (0, which is "!" in GPT-2) is learned: another loss and gradient.
    000 says that the attention mask keeps padding out of the loss; isolated or not, only labels do.
    """
    store = make_store([[1, 2, 3]], vocab=V)
    for isolate in (False, True):
        (ours,) = all_rows(Source("s", store, BestFit(np.asarray(store.ends), T), isolate), 8)
        theirs = replace(ours, labels_BT=np.where(ours.labels_BT == ours.ignore, 0, ours.labels_BT))
        engine = _engine(tmp_path)
        assert (ours.counts()["token"], theirs.counts()["token"]) == (2, T)
        gradients = _gradient(engine, ours), _gradient(engine, theirs)
        assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


def test_C5_a_changed_masked_target_changes_nothing(make_store):
    batches = []
    for last in (5, 9):
        store = make_store([[1, 2, 3, 4, last]], masks=[[0, 1, 1, 1, 0]])
        source = Source("s", store, BestFit(np.asarray(store.ends), 4), True)
        batches.append(make_batch([source], np.zeros(1, int), np.zeros(1, int)))
    for f in fields(batches[0]):
        assert np.array_equal(getattr(batches[0], f.name), getattr(batches[1], f.name)), f.name


def test_C7_ranks_of_unequal_counts_divide_by_the_global_count(tmp_path):
    batch = _ragged()
    engine = _engine(tmp_path)
    whole, counts = _gradient(engine, batch), batch.counts()

    class Two(Mesh):
        def sum(self, tensor):
            return torch.tensor(list(counts.values())) if tensor.dtype == torch.int64 else tensor

    engine.mesh = Two(0, 2)
    halves = [_gradient(engine, part) for part in batch.micro_batches(6)]  # 6 + 6 + 4 rows, other counts in each
    assert (sum(halves) - whole).norm() <= 1e-12 * whole.norm()


def test_C7_tokens_of_a_step():
    for rows, context, tokens in (
        (48, 1024, 49_152),
        (480, 1024, 491_520),
        (768, 1024, 786_432),
        (2048, 2048, 4_194_304),
    ):
        assert rows * Concatenated(_ends([10_000]), context).row_targets == tokens


def test_D6_the_logged_norm_is_the_one_before_clipping(tmp_path):
    free = _engine(tmp_path / "a").step(_ragged()).grad_norm
    tight = _engine(tmp_path / "b")
    tight.plan = replace(tight.plan, optim=OptimSettings(clip=1e-3))
    assert tight.step(_ragged()).grad_norm == free > 1e-3
    kept = torch.cat([p.grad.flatten() for p in tight.trained.values()]).norm()
    assert kept.item() == pytest.approx(1e-3)


def test_D6_a_step_without_labels_moves_nothing_to_nan(tmp_path):
    batch = _ragged()
    engine = _engine(tmp_path)
    assert engine.step(replace(batch, labels_BT=np.full_like(batch.labels_BT, -100))).grad_norm == 0
    assert all(p.isfinite().all() for p in engine.trained.values())


def test_D12_best_is_the_weights_of_the_lowest_validation_loss(tmp_path, make_store):
    engine, source = _engine(tmp_path, "fp32", micro=8), _text(make_store)
    losses, seen = {0: 9.0, 5: 3.0, 10: 1.0, 15: 2.0, 20: 2.0}, {}

    def evaluation(step, whole):
        seen[step] = engine.named["norm.weight"].detach().clone()
        return {"val_loss_nats": losses[step]}

    order = Order((source.plan.rows,), (1.0,), seed=1)
    loader = Loader(lambda step: make_batch([source], *order.at(8 * (step - 1), 8)), 1, 20)
    train(engine, lambda first: iter(loader), evaluation, EventLog(tmp_path / "m.jsonl"), lambda m, rate: None)
    loader.close()
    weights = {n: torch.empty_like(t) for n, t in engine.training_state.tensors(moments=False).items()}
    state = checkpoint.load(tmp_path / "checkpoints" / "best", weights)
    assert (state["best_step"], state["best_val"]) == (10, 1.0)
    assert torch.equal(weights["model.norm.weight"], seen[10])
    assert not torch.equal(seen[10], seen[20])


def test_E1_the_loss_is_that_of_the_responses_alone(tmp_path, make_store):
    ids, mask = list(range(1, T + 2)), [0] * 6 + [1] * (T - 5)
    store = make_store([ids], masks=[mask], vocab=V)
    (batch,) = all_rows(Source("s", store, BestFit(np.asarray(store.ends), T), True), 1)
    engine = _engine(tmp_path)
    out = engine.model(torch.tensor([ids[:-1]]))
    logp = token_logps(out.hidden, out.head, torch.tensor([ids[1:]]))[0]
    learned = torch.tensor(mask[1:])
    expected = -(logp * learned).sum() / learned.sum()
    assert engine.gradients(batch)[0].item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_step_that_is_not_compiled_imports_no_compiler() -> None:
    """Nor what it brings along, nor what reads tables: seconds and 100 MB of every process that trains."""
    code = (
        "import pathlib, ingot.stages.training.build; from tests.train.test_engine import _engine, _ragged\n"
        "engine = _engine(pathlib.Path('nowhere'), 'fp32'); engine.step(_ragged()); engine.training_state.tensors()\n"
        "assert engine.state['step'] == 1"
    )
    assert_not_imported(code, "torch._dynamo", "sympy", "pyarrow")
