"""`rows(step)`: a permutation, exact shares, no state."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ingot.data.batch_size import constant
from ingot.data.batches import Source, make_batch
from ingot.data.packing import Concatenated
from ingot.data.sampler import PATTERN_LENGTH, Order, key_of, mixture_pattern, permute


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_C4_the_shuffle_is_a_permutation(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_C4_the_shuffle_runs_backwards(n: int, key: int) -> None:
    there = permute(np.arange(n), n, key)
    assert permute(there, n, key, inverse=True).tolist() == list(range(n))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 1), st.integers(0, 90)), min_size=1, max_size=3),
    st.integers(0, 300),
    st.booleans(),
)
def test_the_places_of_a_row_are_where_it_is_drawn(
    sources: list[tuple[int, float, int]], end: int, shuffled: bool
) -> None:
    rows, shares, drawn = zip(*sources, strict=True)
    order = Order(rows, shares, seed=1, drawn=drawn, shuffled=shuffled)
    source, row = order.at(0, end)
    for s in range(len(rows)):
        for r in {0, rows[s] // 2, rows[s] - 1}:
            assert order.positions(s, r, end) == np.flatnonzero((source == s) & (row == r)).tolist()


def test_C4_the_shuffle_is_random_access_at_any_length() -> None:
    n = 10**15
    there = permute(np.array([0, 1, n - 1]), n, 7)
    assert len(set(there.tolist())) == 3
    assert ((there >= 0) & (there < n)).all()


def test_C4_another_epoch_and_another_seed_are_other_orders() -> None:
    order, other = Order((1000,), (1.0,), seed=1), Order((1000,), (1.0,), seed=2)
    first = [order.at(100 * n, 100)[1].tolist() for n in range(10)]
    second = [order.at(100 * n, 100)[1].tolist() for n in range(10, 20)]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(1000))
    assert first != second
    assert first[0] != other.at(0, 100)[1].tolist()


def test_rows_in_the_stored_order_are_mixed_like_shuffled_ones() -> None:
    """Each source ascends, epoch by epoch; which source a row comes from is the same."""
    order = Order((50, 70), (3.0, 1.0), seed=5, drawn=(7, 0), shuffled=False)
    source, row = order.at(0, 400)
    assert source.tolist() == Order((50, 70), (3.0, 1.0), seed=5).at(0, 400)[0].tolist()
    for s, (rows, first) in enumerate(((50, 7), (70, 0))):
        own = row[source == s]
        assert own.tolist() == [(first + i) % rows for i in range(len(own))]


def test_C4_100_samples_in_batches_of_32(make_store) -> None:
    """With `drop_last` an epoch of 100 rows is 3 batches of 32, and 4 rows are left out. Here these are the 3 batches
    that lie in the first epoch. The fourth begins with the 4 rows that are left and goes on with 28 of the next epoch:
    every batch is full, and after 25 of them every row was there 8 times.
    """
    context, rows = 4, 100
    store = make_store([(np.arange(rows * context + 1) % 64).tolist()])
    source = Source("s", store, Concatenated(np.asarray(store.ends), context), isolate=False)
    order, sizes = Order((source.plan.rows,), (1.0,), seed=1), constant(32)
    assert source.plan.rows == rows

    def rows_of(step: int) -> list[int]:
        batch = make_batch([source], *order.at(sizes.rows_before(step), sizes.rows(step)))
        assert np.array_equal(batch.ids_BT[:, 0], batch.row_B * context % 64)
        return batch.row_B.tolist()

    batches = [rows_of(step) for step in range(1, 26)]
    assert {len(batch) for batch in batches} == {32}
    within = [step for step in range(1, 26) if sizes.rows_before(step + 1) <= rows]
    assert len(within) == len(DataLoader(range(rows), batch_size=32, drop_last=True)) == 3  # type: ignore[arg-type]
    shown = [row for batch in batches[:3] for row in batch]
    assert len(set(shown)) == 96
    assert set(batches[3][:4]) == set(range(rows)) - set(shown)
    second = batches[3][4:] + list(chain(*batches[4:]))
    assert sorted(second[:rows]) == list(range(rows))
    assert second[:rows] != shown + batches[3][:4], "the next epoch has an order of its own"
    assert np.bincount(list(chain(*batches))).tolist() == [8] * rows


def test_shuffled_positions_look_uniform() -> None:
    """Chi-squared of where the first tenth of the rows goes; a sorted order fails by orders of magnitude."""
    n = 100_000
    where = permute(np.arange(n // 10), n, key_of(3))
    counts = np.histogram(where, bins=50, range=(0, n))[0]
    expected = n / 10 / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100
    control = np.histogram(np.arange(n // 10), bins=50, range=(0, n))[0]
    assert ((control - expected) ** 2 / expected).sum() > 10_000


@settings(deadline=None)
@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(0, 5000), st.integers(20, 500))
def test_B9_any_window_has_the_asked_shares(weights: list[float], start: int, length: int) -> None:
    pattern = mixture_pattern(weights)[start : start + length]
    share = np.array(weights) / sum(weights)
    counts = np.bincount(pattern, minlength=len(weights))
    assert (abs(counts - share * len(pattern)) <= len(weights)).all()


def test_each_source_is_drawn_in_order_without_a_gap() -> None:
    order = Order((50, 70), (3.0, 1.0), seed=5)
    drawn = [[], []]
    for step in range(199):
        for s, r in zip(*order.at(16 * step, 16), strict=True):
            drawn[s].append(int(r))
    for source, rows in enumerate(drawn):
        n = order.rows[source]
        for epoch in range(len(rows) // n):
            assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert len(drawn[0]) / len(drawn[1]) == pytest.approx(3, rel=0.02)
    assert order.drawn_after(199 * 16) == (len(drawn[0]), len(drawn[1]))


def test_a_share_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=f"1 / {PATTERN_LENGTH:,}"):
        Order((5, 5), (1.0, 1e-6), seed=1)
