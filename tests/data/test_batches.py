"""Batches: the one shift, padding, masks, document borders."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ingot
from ingot.data.batches import IGNORE, Loader, Source, all_rows, make_batch
from ingot.data.packing import PAD, BestFit, Concatenated, OnePerRow
from ingot.data.sampler import Order
from ingot.store.columns import ColumnFiller
from ingot.store.reader import ColumnSpec, Store


def _source(store, plan, isolate=False, pad=0) -> Source:
    return Source("s", store, plan, isolate, pad)


def test_C1_the_pairs_of_six_tokens(make_store) -> None:
    store = make_store([[10, 11, 12, 13, 14, 15]])
    source = _source(store, Concatenated(np.asarray(store.ends), 4, stride=1))
    batch = make_batch([source], np.zeros(2, int), np.arange(2))
    assert batch.ids_BT.tolist() == [[10, 11, 12, 13], [11, 12, 13, 14]]
    assert batch.labels_BT.tolist() == [[11, 12, 13, 14], [12, 13, 14, 15]]


def test_D1_counts_of_predictions(make_store) -> None:
    """T + 1 ids give T targets, a sequence of T tokens T - 1; 4 rows of 8 are 32 predictions, 64 x 64 are 4,096."""
    store = make_store([list(range(60)) * 80])
    for rows, context, predictions in ((4, 8, 32), (64, 64, 4096)):
        source = _source(store, Concatenated(np.asarray(store.ends), context))
        batch = make_batch([source], np.zeros(rows, int), np.arange(rows))
        assert batch.counts()["token"] == predictions
    short = make_store([list(range(9))])
    batch = make_batch([_source(short, BestFit(np.asarray(short.ends), 20))], np.zeros(1, int), np.zeros(1, int))
    assert batch.counts() == {"token": 8, "sequence": 1}


def test_C5_padding_has_no_label_whatever_the_pad_id(make_store) -> None:
    store = make_store([[1, 2, 3], [4, 5]])
    for pad in (0, 63):
        source = _source(store, BestFit(np.asarray(store.ends), 9), isolate=True, pad=pad)
        batch = make_batch([source], np.zeros(1, int), np.zeros(1, int))
        assert batch.ids_BT.tolist() == [[1, 2, 3, 4, 5, pad, pad, pad, pad]]
        assert batch.labels_BT.tolist() == [[2, 3, IGNORE, 5, *[IGNORE] * 5]]
        assert batch.positions_BT[0, :5].tolist() == [0, 1, 2, 0, 1]
        assert batch.documents_BT[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1, -1]


def test_C5_pad_id_zero_is_a_token_like_any_other(make_store) -> None:
    """Pad id 0 is "!" in GPT-2: a real 0 must keep its label, so padding goes by place and never by id."""
    store = make_store([[0, 0, 5, 0]])
    batch = make_batch([_source(store, BestFit(np.asarray(store.ends), 6))], np.zeros(1, int), np.zeros(1, int))
    assert batch.labels_BT.tolist() == [[0, 5, 0, IGNORE, IGNORE, IGNORE]]


def test_E1_mask_goes_by_target(make_store) -> None:
    store = make_store([[1, 2, 3, 4, 5]], masks=[[0, 0, 1, 1, 0]])
    batch = make_batch([_source(store, BestFit(np.asarray(store.ends), 4))], np.zeros(1, int), np.zeros(1, int))
    assert batch.labels_BT.tolist() == [[IGNORE, 3, 4, IGNORE]]


def test_concat_trains_on_what_follows_the_end_of_a_document(make_store) -> None:
    store = make_store([[1, 2], [3, 4, 5]])
    plan = Concatenated(np.asarray(store.ends), 4)
    joined = make_batch([_source(store, plan)], np.zeros(1, int), np.zeros(1, int))
    apart = make_batch([_source(store, plan, isolate=True)], np.zeros(1, int), np.zeros(1, int))
    assert joined.labels_BT.tolist() == [[2, 3, 4, 5]]
    assert joined.documents_BT is None
    assert apart.labels_BT.tolist() == [[2, IGNORE, 4, 5]]
    assert apart.positions_BT.tolist() == [[0, 1, 0, 1]]
    assert joined.inputs["positions_BT"] is None  # the model's own
    assert joined.positions_BT.tolist() == [[0, 1, 2, 3]]
    assert apart.inputs["positions_BT"] is apart.positions_BT


def test_D1_source_error_labels_are_shifted_in_one_file_only() -> None:
    """002 shifts twice and so trains on the token after next; here no other file may slice `[:, 1:]` of labels.

    What is run in the environments of peers cannot call ours, and is no part of a training.
    """
    root = Path(ingot.__file__).parent
    shift = re.compile(r"(ids|labels)\w*\[[^\]]*(:, 1:|:, :-1)")
    shifting = [str(f.relative_to(root)) for f in root.rglob("*.py") if shift.search(f.read_text())]
    assert shifting == ["data/batches.py"]


def test_C2_to_a_gpu_batches_are_pinned_and_nothing_waits(make_store, monkeypatch) -> None:
    """Every array goes through pinned memory by a non-blocking copy; on the CPU none does."""
    store, pinned, moved = make_store([list(range(9))]), [], []
    batch = make_batch(
        [_source(store, Concatenated(np.asarray(store.ends), 4), isolate=True)], np.zeros(1, int), np.arange(1)
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, non_blocking: moved.append((device, non_blocking)) or t)
    batch.to("cpu")
    assert pinned == []
    assert set(moved) == {("cpu", False)}
    moved.clear()
    batch.to("cuda")
    assert len(pinned) == len(moved) == 6
    assert set(moved) == {("cuda", True)}


def test_C7_microbatches_are_the_batch(make_store) -> None:
    store = make_store([list(range(50)) * 10])
    source = _source(store, Concatenated(np.asarray(store.ends), 8), isolate=True)
    (batch,) = all_rows(source, 10, limit=10)
    parts = list(batch.micro_batches(3))
    assert [len(p) for p in parts] == [3, 3, 3, 1]
    assert np.array_equal(np.concatenate([p.labels_BT for p in parts]), batch.labels_BT)


def test_C4_the_loader_gives_the_batches_of_the_steps_and_its_errors(make_store) -> None:
    store = make_store([list(range(60)) * 20])
    source = _source(store, Concatenated(np.asarray(store.ends), 8))
    order = Order((source.plan.rows,), (1.0,), seed=3)

    def make(step: int):
        return make_batch([source], *order.at(4 * (step - 1), 4))

    loader = Loader(make, 5, 12)
    rows = [b.row_B.tolist() for b in loader]
    loader.close()
    assert rows == [order.at(4 * n, 4)[1].tolist() for n in range(4, 12)]

    def broken(step: int):
        raise RuntimeError("disk on fire")

    loader = Loader(broken, 1, 2)
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(iter(loader))
    loader.close()


def test_a_closed_loader_makes_no_more_batches(make_store) -> None:
    """Where a run ends before its steps do: a thread that went on would die inside of numpy when the process exits."""
    source = _source(store := make_store([list(range(60)) * 20]), Concatenated(np.asarray(store.ends), 8))
    made: list[int] = []

    def make(step: int):
        made.append(step)
        return make_batch([source], np.zeros(2, np.int64), np.arange(2))

    loader = Loader(make, 1, 10**9)
    next(iter(loader))
    loader.close()
    assert not loader._thread.is_alive()
    assert len(made) < 10


# -- columns of a store ------------------------------------------------------------------------------------------------

DOCUMENTS = [list(range(10, 17)), list(range(20, 25)), list(range(30, 41)), list(range(40, 44))]
"""Of 7, 5, 11 and 4 tokens."""
PLANS = {
    "concatenated": lambda ends: Concatenated(ends, 8, tail=True),
    "best-fit": lambda ends: BestFit(ends, 12),
    "one per row": lambda ends: OnePerRow(ends, 12, 2),
}


def _annotated(make_store, path: Path, masks=None, shift: int = 1000) -> Store:
    """A store with columns of each token: `id` is the token's id + shift, `wide` that and two multiples of it."""
    store = make_store(DOCUMENTS, masks=masks)
    columns = {"id": ColumnSpec("token", "<i4"), "wide": ColumnSpec("token", "<f4", 3)}
    filler, token = ColumnFiller(path, store, columns), np.arange(store.tokens)
    value = store.ids.gather(token).astype(np.int64) + shift
    filler.put("id", token, value)
    filler.put("wide", token, value[:, None] * np.array([1, 2, 3]))
    filler.publish()
    return Store.open(store.path, overlays=[path])


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_columns_per_token_lie_beside_the_labels_that_they_belong_to(make_store, tmp_path, plan, isolate) -> None:
    """A value belongs to the token that is predicted, and is 0 in padding, whatever the pad id."""
    store = _annotated(make_store, tmp_path / "overlay")
    source = Source("s", store, PLANS[plan](np.asarray(store.ends)), isolate, pad_id=63)
    (batch,) = all_rows(source, 100)
    label_BT, id_BT, wide_BT3 = batch.labels_BT, batch.columns["id_BT"], batch.columns["wide_BT"]
    assert (id_BT.shape, wide_BT3.shape) == (label_BT.shape, (*label_BT.shape, 3))
    assert (id_BT.dtype, wide_BT3.dtype) == (np.int32, np.float32)
    labelled = label_BT != IGNORE
    assert np.array_equal(id_BT[labelled], label_BT[labelled] + 1000)
    padded = source.plan.index(np.arange(source.plan.rows))[0][:, 1:] == PAD
    assert padded.any()
    assert not id_BT[padded].any()
    assert (id_BT[~padded] > 1000).all(), "where a document begins there is a token, if no label"
    assert np.array_equal(wide_BT3, id_BT[..., None] * np.array([1, 2, 3]))


def test_columns_per_token_go_with_their_rows_and_know_no_mask(make_store, tmp_path) -> None:
    masks = [[0] * (len(d) - 2) + [1, 1] for d in DOCUMENTS]
    store = _annotated(make_store, tmp_path / "overlay", masks)
    source = Source("s", store, OnePerRow(np.asarray(store.ends), 12), isolate=False)
    (batch,) = all_rows(source, 100)
    assert (batch.labels_BT != IGNORE).sum() == 8
    assert (batch.columns["id_BT"] != 0).sum() == batch.columns["lengths_B"].sum() - len(DOCUMENTS)
    micros = list(batch.micro_batches(3))
    assert np.array_equal(np.concatenate([m.columns["wide_BT"] for m in micros]), batch.columns["wide_BT"])
    moved = batch.take(np.array([2, 0])).to("cpu")
    assert isinstance(moved.columns["wide_BT"], torch.Tensor)
    assert moved.columns["wide_BT"].tolist() == batch.columns["wide_BT"][[2, 0]].tolist()


def test_rows_of_a_source_without_the_column_hold_zeros_in_it(make_store, tmp_path) -> None:
    """In a mixture, whose rows may be of other widths too."""
    store, plain = _annotated(make_store, tmp_path / "overlay"), make_store([list(range(50))])
    sources = [
        Source("with", store, OnePerRow(np.asarray(store.ends), 12), isolate=False),
        Source("without", plain, Concatenated(np.asarray(plain.ends), 20), isolate=False),
    ]
    batch = make_batch(sources, np.array([0, 1, 0, 1]), np.array([1, 0, 2, 1]))
    assert batch.context == 20
    assert batch.columns["wide_BT"].shape == (4, 20, 3)
    assert not batch.columns["id_BT"][[1, 3]].any()
    assert batch.columns["id_BT"][0].tolist() == [1021, 1022, 1023, 1024, *[0] * 16]
    assert batch.columns["id_BT"][2].tolist() == [*range(1031, 1041), *[0] * 10]
