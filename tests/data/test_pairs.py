"""Pairs in rows: both sides adjacent, whole or left out, padded to the longest of them; micro-batches keep a pair."""

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.data.batches import IGNORE, Source, all_rows, make_batch
from ingot.data.packing import PAD, OnePerRow, make_row_plan

PAIRS = [[1, 2, 3, 9], [1, 2, 4, 5, 9], [1, 6, 9], [1, 7, 9], [1, *range(10, 40), 9], [1, 8, 9]]
MASKS = [[0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1], [0, 1, 1], [0, *[1] * 31], [0, 1, 1]]


def _source(make_store, context: int, group: int = 2) -> Source:
    store = make_store(PAIRS, masks=MASKS)
    return Source("pairs", store, OnePerRow(np.asarray(store.ends), context, group), isolate=False, pad_id=63)


def test_a_pair_is_two_adjacent_rows_and_its_last_token_is_an_input(make_store) -> None:
    batch = make_batch([_source(make_store, 20)], np.zeros(2, int), np.array([1, 0]))
    assert (len(batch), batch.group, batch.context) == (4, 2, 16)
    assert batch.ids_BT[0, :4].tolist() == [1, 6, 9, 63]
    assert batch.ids_BT[2, :5].tolist() == [1, 2, 3, 9, 63]
    assert batch.labels_BT[3, :5].tolist() == [IGNORE, 4, 5, 9, IGNORE]
    assert batch.columns["lengths_B"].tolist() == [3, 3, 4, 5]
    assert [int(batch.ids_BT[i, n - 1]) for i, n in enumerate(batch.columns["lengths_B"])] == [9] * 4
    assert batch.row_B.tolist() == [1, 1, 0, 0]
    assert batch.counts() == {"token": 9, "sequence": 4, "pair": 2}


def test_a_pair_that_does_not_fit_is_left_out_whole_and_counted(make_store) -> None:
    source = _source(make_store, 20)
    assert (source.plan.rows, source.plan.dropped, source.plan.dropped_tokens) == (2, 1, 35)
    assert [s.document for s in source.plan.slices(1)] == [2, 3]
    assert source.plan.rows_of(3) == [1]
    assert source.plan.rows_of(5) == []
    assert _source(make_store, 32).plan.rows == 3
    with pytest.raises(
        UserError, match="all 3 pairs have a side longer than the maximum of 2 tokens, and they are not"
    ):
        make_row_plan("one-per-row", np.asarray(source.store.ends), 2, None, True, "data.p", 2)


def test_every_row_once_as_wide_as_the_longest_of_its_batch(make_store) -> None:
    source = _source(make_store, 64)
    batches = list(all_rows(source, 4))
    assert [(len(b), b.context) for b in batches] == [(4, 16), (2, 32)]
    index, document = source.plan.index(np.arange(3))
    assert np.array_equal(np.sort(index[index != PAD]), np.arange(sum(map(len, PAIRS))))
    assert document[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_2_0_micro_batches_never_split_a_pair(make_store, rows) -> None:
    (batch,) = all_rows(_source(make_store, 64), 100)
    micros = list(batch.micro_batches(rows))
    assert all(len(m) % 2 == 0 and len(m) <= max(2, rows) for m in micros)
    assert sum(m.counts()["pair"] for m in micros) == 3
    assert np.array_equal(np.concatenate([m.columns["lengths_B"] for m in micros]), batch.columns["lengths_B"])
    labels = batch.labels_BT.copy()
    labels[2] = IGNORE  # one side gone: no pair
    assert type(batch)(**{**vars(batch), "labels_BT": labels}).counts()["pair"] == 2


def test_columns_move_with_their_batch(make_store) -> None:
    import torch

    batch = make_batch([_source(make_store, 64)], np.zeros(2, int), np.array([0, 1])).to("cpu")
    assert isinstance(batch.columns["lengths_B"], torch.Tensor)
    assert [m.columns["lengths_B"].tolist() for m in batch.micro_batches(2)] == [[4, 5], [3, 3]]
