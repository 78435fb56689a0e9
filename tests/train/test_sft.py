"""Supervised fine-tuning is `lm` on a store with a mask; the numbered claims about it, each with a control.

(ALGORITHMS 2.1; templates and masks by construction are in `tests/tokenizer` and `tests/store`, truncation in
`tests/data/test_packing.py`.)
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ingot.data.batches import IGNORE, Batch, Source, all_rows
from ingot.data.packing import BestFit
from ingot.model.transformer import Transformer
from tests.train.test_engine import T, V, _engine, _gradient

LENGTHS = (5, 6, 3, 7, 4, 4)
"""Documents that fill 3 rows of T + 1 with some padding left."""


def _conversations(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Documents and masks: the last two tokens of each are learned."""
    draw = np.random.default_rng(seed)
    documents = [draw.integers(0, V, n).tolist() for n in LENGTHS]
    return documents, [[0] * (n - 2) + [1, 1] for n in LENGTHS]


def _packed(make_store, documents, masks) -> Batch:
    store = make_store(documents, masks=masks, vocab=V)
    source = Source("talks", store, BestFit(np.asarray(store.ends), T, store.columns["mask"].read), isolate=True)
    (batch,) = all_rows(source, 100)
    assert len(batch) < len(documents)
    return batch


def _logits(model: Transformer, batch: Batch) -> torch.Tensor:
    b = batch.to("cpu")
    with torch.no_grad():
        return model(b.ids_BT, positions_BT=b.positions_BT, documents_BT=b.documents_BT).logits


def _alone(model: Transformer, documents, masks) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of documents run one by one, from whole logits in fp64, and its gradient: no code of ours but the model.

    Masks go by the target: logits[i] predict token i + 1.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, mask in zip(documents, masks, strict=True):
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()
        labels, learned = torch.tensor(ids[1:]), torch.tensor(mask[1:]).bool()
        total = total + F.cross_entropy(logits[learned], labels[learned], reduction="sum")
        count += int(learned.sum())
    gradients = torch.autograd.grad(total / count, list(model.parameters()))
    return (total / count).detach(), torch.cat([g.flatten().double() for g in gradients])


def test_2_1_i_flipping_any_masked_label_changes_nothing_to_the_bit(tmp_path, make_store):
    """What a label is where the mask is 0 reaches neither loss nor gradient; the inputs are held fixed."""
    documents, masks = _conversations()
    engine, batch = _engine(tmp_path, "fp32"), _packed(make_store, documents, masks)
    loss, gradient = engine.gradients(batch)[0], _gradient(engine, batch)
    changed = {0: 0, 1: 0}
    for d, n in enumerate(LENGTHS):
        for place in range(n):
            other = [list(ids) for ids in documents]
            other[d][place] = (other[d][place] + 1) % V
            flipped = replace(_packed(make_store, other, masks), ids_BT=batch.ids_BT)
            same = engine.gradients(flipped)[0] == loss and torch.equal(_gradient(engine, flipped), gradient)
            assert same == (masks[d][place] == 0), (d, place)
            changed[masks[d][place]] += not same
    assert changed == {0: 0, 1: sum(map(sum, masks))}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-12)])
def test_2_1_ii_packed_documents_are_documents_run_alone(tmp_path, make_store, precision, tolerance):
    documents, masks = _conversations()
    engine, batch = _engine(tmp_path, precision), _packed(make_store, documents, masks)
    loss, gradient = _alone(engine.model, documents, masks)
    assert engine.gradients(batch)[0].item() == pytest.approx(loss.item(), rel=tolerance)
    assert (_gradient(engine, batch) - gradient).norm() <= tolerance * gradient.norm()
    packed = _logits(engine.model, batch)
    for d, ids in enumerate(documents):
        with torch.no_grad():
            alone = engine.model(torch.tensor([ids])).logits[0]
        here = torch.from_numpy(batch.documents_BT == d)
        torch.testing.assert_close(packed[here], alone[: int(here.sum())], rtol=tolerance, atol=tolerance)
    mixed = replace(batch, documents_BT=None)
    assert (_gradient(engine, mixed) - gradient).norm() > 1e-3 * gradient.norm()  # control: documents see each other
    unmoved = replace(batch, positions_BT=np.broadcast_to(np.arange(T), batch.ids_BT.shape).copy())
    assert (_gradient(engine, unmoved) - gradient).norm() <= 10 * tolerance * gradient.norm()  # RoPE is relative


def test_2_1_iii_the_order_of_documents_in_a_pack_changes_no_documents_loss(tmp_path):
    documents, masks = _conversations()
    engine = _engine(tmp_path, "fp64")

    def losses(order: list[int]) -> dict[int, float]:
        """Each document's loss in one row that holds them all in this order."""
        row = np.concatenate([documents[d] for d in order])
        learned = np.concatenate([masks[d] for d in order])
        document = np.repeat(order, [LENGTHS[d] for d in order])
        place = np.concatenate([np.arange(LENGTHS[d]) for d in order])
        batch = Batch(row[None, :-1], row[None, 1:], place[None, :-1], document[None, :-1], np.zeros(1), np.zeros(1))
        logp = torch.log_softmax(_logits(engine.model, batch)[0], -1).numpy()
        nll = -logp[np.arange(len(row) - 1), row[1:]]
        kept = (learned[1:] == 1) & (document[1:] == document[:-1])
        return {d: float(nll[kept & (document[1:] == d)].sum()) for d in order}

    first = losses(list(range(len(LENGTHS))))
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        assert losses(order) == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_2_1_iv_a_changed_token_of_one_document_leaves_the_others_logits_bit_identical(
    tmp_path, make_store, monkeypatch, impl
):
    documents, masks = _conversations()
    engine = _engine(tmp_path, "fp32")
    monkeypatch.setattr("ingot.model.attention.fastest_impl", lambda *_: impl)
    batch = _packed(make_store, documents, masks)
    before = _logits(engine.model, batch)
    changed = [list(ids) for ids in documents]
    shared = next(row for row in range(len(batch)) if len(set(batch.documents_BT[row]) - {-1}) > 1)
    d = int(batch.documents_BT[shared, 0])
    changed[d][1] = (changed[d][1] + 5) % V
    after_batch = _packed(make_store, changed, masks)
    after = _logits(engine.model, after_batch)
    own = torch.from_numpy(batch.documents_BT == d)
    assert torch.equal(before[~own], after[~own])
    assert not torch.equal(before[own], after[own])
    leaky = [_logits(engine.model, replace(b, documents_BT=None)) for b in (batch, after_batch)]
    assert not torch.equal(leaky[0][~own], leaky[1][~own])


def test_2_1_v_padding_on_the_left_or_on_the_right_gives_the_same_logits(tmp_path):
    """We pad on the right only; a place of padding is a document of its own, wherever it stands."""
    model, n, pad = _engine(tmp_path, "fp32").model, 7, T - 7
    ids = np.random.default_rng(0).integers(0, V, n)
    found = []
    for left, right in ((0, pad), (pad, 0)):
        places = np.concatenate([np.arange(left), np.arange(n), np.arange(right)])[None]
        document = np.concatenate([np.full(left, -1), np.zeros(n, int), np.full(right, -1)])[None]
        row = np.concatenate([np.zeros(left, int), ids, np.zeros(right, int)])[None]
        batch = Batch(row, row, places, document, np.zeros(1), np.zeros(1))
        found.append(_logits(model, batch)[0, left : left + n])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_2_1_the_loss_is_that_of_transformers_with_the_items_of_the_whole_step(tmp_path, make_store):
    """Their loss function, given the number of targets of the step, summed over micro-batches of one row."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    documents, masks = _conversations()
    batch = _packed(make_store, documents, masks)
    ours = _engine(tmp_path, "fp64", micro=1).gradients(batch)[0].item()
    model, items, theirs = _engine(tmp_path, "fp64").model, batch.counts()["token"], 0.0
    for row in batch.micro_batches(1):
        labels = torch.from_numpy(row.labels_BT)
        loss = ForCausalLMLoss(
            _logits(model, row), labels=None, vocab_size=V, num_items_in_batch=items, shift_labels=labels
        )
        theirs += loss.item()
    assert ours == pytest.approx(theirs, rel=1e-6)  # theirs casts logits to fp32


def test_2_1_the_first_token_of_a_document_and_padding_are_never_targets(make_store):
    """Even with everything learned: the end of one document does not predict the beginning of the next."""
    documents, _ = _conversations()
    batch = _packed(make_store, documents, [[1] * n for n in LENGTHS])
    assert batch.counts()["token"] == sum(LENGTHS) - len(LENGTHS)
    last = batch.documents_BT[:, :-1] != batch.documents_BT[:, 1:]
    assert (batch.labels_BT[:, :-1][last] == IGNORE).all()
    assert (batch.labels_BT[batch.documents_BT == -1] == IGNORE).all()
