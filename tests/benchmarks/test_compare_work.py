"""Ratios and their intervals by hand, and what counts as other work."""

import math
import re

import pytest

from benchmarks import compare
from tests.benchmarks.conftest import RESULT

T_2 = 4.302652729911275
"""97.5 % of Student's t with 2 degrees of freedom: sqrt(2) * 0.95 / sqrt(1 - 0.95^2)."""


def test_ratio_is_the_geometric_mean_with_students_interval_of_the_logarithms() -> None:
    found = compare.ratio([20.0, 40.0, 80.0], [10.0, 10.0, 10.0])
    half = T_2 * math.log(2) / math.sqrt(3)  # logs are ln 2 times 1, 2, 3: standard deviation ln 2
    assert found.mean == pytest.approx(4.0, rel=1e-12)
    assert found.low == pytest.approx(4 * math.exp(-half), rel=1e-9)
    assert found.high == pytest.approx(4 * math.exp(half), rel=1e-9)


def test_the_inverse_ratio_has_the_inverse_interval() -> None:
    ours, theirs = [31.0, 33.0, 29.5], [10.1, 10.2, 9.7]
    there, back = compare.ratio(ours, theirs), compare.ratio(theirs, ours)
    assert back.mean == pytest.approx(1 / there.mean)
    assert there.low is not None
    assert back.high == pytest.approx(1 / there.low)


def test_what_slows_a_whole_repetition_down_does_not_widen_the_interval() -> None:
    found = compare.ratio([30.0, 15.0, 24.0], [10.0, 5.0, 8.0])
    assert found.low == pytest.approx(3.0)
    assert found.high == pytest.approx(3.0)
    assert compare.spread([30.0, 15.0, 24.0]) == pytest.approx(15 / 24)


def test_one_repetition_has_no_interval() -> None:
    found = compare.ratio([3.0], [1.5])
    assert (found.mean, found.low, found.high) == (pytest.approx(2.0), None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"losses": [4.111, 4.051]}, None),
        ({"losses": [4.11, 4.06]}, r"loss of step 2: 4.0600 against our 4.0500, expected at most 0.002 apart"),
        ({"losses": [4.11, math.nan]}, "loss of step 2: nan"),
        ({"losses": [4.11]}, "steps compared: 1 against our 2"),
        ({"parameters": 34881}, "parameters: 34,881 against our 34,880"),
        ({"flops_per_token": 220609}, "flops_per_token: 220,609"),
        ({"versions": {"torch": "2.12.1"}}, r"torch: 2.12.1 against our 2.13.0\+cpu"),
        ({"versions": {"torch": "2.13.0"}}, None),
    ],
)
def test_other_work_is_named(changes: dict, words: str | None) -> None:
    found = compare.difference(RESULT, {**RESULT, **changes}, compare.BAND_FP32)
    if words is None:
        assert found is None
    else:
        assert re.match(words, found or ""), found


def test_a_peer_that_learns_nothing_is_found_out() -> None:
    """The band is far below what a few steps change: untrained losses of the tiny shape are 0.04 nats off by then."""
    assert compare.difference(RESULT, {**RESULT, "losses": [4.11, 4.11]}, compare.BAND_BF16) is not None
