"""`rows(step)`: a permutation, exact shares, no state."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.order import BLOCK, Order, key_of, permute, spread


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_C4_the_shuffle_is_a_permutation(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


def test_C4_the_shuffle_is_random_access_at_any_length() -> None:
    n = 10**15
    there = permute(np.array([0, 1, n - 1]), n, 7)
    assert len(set(there.tolist())) == 3
    assert ((there >= 0) & (there < n)).all()


def test_C4_another_epoch_and_another_seed_are_other_orders() -> None:
    order, other = Order((1000,), (1.0,), 100, seed=1), Order((1000,), (1.0,), 100, seed=2)
    first = [order.at(s)[1].tolist() for s in range(1, 11)]
    second = [order.at(s)[1].tolist() for s in range(11, 21)]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(1000))
    assert first != second
    assert first[0] != other.at(1)[1].tolist()


def test_C4_100_samples_in_batches_of_32() -> None:
    """Three whole batches of 32 come out of 100 rows before the fourth begins a new epoch: nothing is dropped."""
    order = Order((100,), (1.0,), 32, seed=1)
    seen = np.concatenate([order.at(s)[1] for s in (1, 2, 3, 4)])
    assert 100 // 32 == 3
    assert len(set(seen[:96].tolist())) == 96
    assert sorted(seen[:100].tolist()) == list(range(100))


def test_shuffled_positions_look_uniform() -> None:
    """Chi-squared of where the first tenth of the rows goes; a sorted order fails by orders of magnitude."""
    n = 100_000
    where = permute(np.arange(n // 10), n, key_of(3))
    counts = np.histogram(where, bins=50, range=(0, n))[0]
    expected = n / 10 / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100
    control = np.histogram(np.arange(n // 10), bins=50, range=(0, n))[0]
    assert ((control - expected) ** 2 / expected).sum() > 10_000


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(0, 5000), st.integers(20, 500))
def test_any_window_has_the_asked_shares(weights: list[float], start: int, length: int) -> None:
    pattern = spread(weights)[start : start + length]
    share = np.array(weights) / sum(weights)
    counts = np.bincount(pattern, minlength=len(weights))
    assert (abs(counts - share * len(pattern)) <= len(weights)).all()


def test_each_source_is_drawn_in_order_without_a_gap() -> None:
    order = Order((50, 70), (3.0, 1.0), 16, seed=5)
    drawn = [[], []]
    for step in range(1, 200):
        for s, r in zip(*order.at(step), strict=True):
            drawn[s].append(int(r))
    for source, rows in enumerate(drawn):
        n = order.rows[source]
        for epoch in range(len(rows) // n):
            assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert len(drawn[0]) / len(drawn[1]) == pytest.approx(3, rel=0.02)
    assert order.epochs(199) == pytest.approx([len(drawn[0]) / 50, len(drawn[1]) / 70], rel=0.01)


def test_a_share_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=f"1 in {BLOCK}"):
        Order((5, 5), (1.0, 1e-6), 4, seed=1)
