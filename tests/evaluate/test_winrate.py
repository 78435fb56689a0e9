"""Win rates: known verdicts add up, swapped sides swap the rate, a judge that goes by the order decides nothing."""

import math

import numpy as np
import pytest

from ingot.core.statistics import wilson
from ingot.evaluate import winrate

NAN = math.nan


def _table(rows):
    return {row["metric"]: row for row in rows}


def test_verdicts_of_scores():
    ours, theirs = np.array([1.0, 0.0, 2.0, NAN, 1.0, 1.05]), np.array([0.0, 1.0, 2.0, 1.0, NAN, 1.0])
    assert np.array_equal(winrate.by_scores(ours, theirs), [1, 0, 0.5, NAN, NAN, 1], equal_nan=True)
    assert np.array_equal(winrate.by_scores(ours, theirs, 0.1), [1, 0, 0.5, NAN, NAN, 0.5], equal_nan=True)


def test_swapping_the_sides_turns_the_rate_around():
    draw = np.random.default_rng(0)
    ours, theirs = draw.integers(0, 5, (2, 60)).astype(float)
    tokens = draw.integers(5, 30, (2, 60)).astype(float)
    there = _table(winrate.rows(winrate.by_scores(ours, theirs), *tokens))
    back = _table(winrate.rows(winrate.by_scores(theirs, ours), *tokens[::-1]))
    assert there["win_rate"]["value"] == pytest.approx(1 - back["win_rate"]["value"])
    assert there["win_rate"]["low"] == pytest.approx(1 - back["win_rate"]["high"])
    assert there["win_rate_longer"]["value"] == pytest.approx(1 - back["win_rate_shorter"]["value"])
    assert there["ties"] == back["ties"]


def test_a_rate_is_wilsons_over_the_prompts_that_were_judged():
    found = _table(winrate.rows(np.array([1, 1, 1, 0, 0.5, NAN]), np.ones(6), np.ones(6)))
    assert found["win_rate"] == {"metric": "win_rate", **wilson(3.5, 5)}
    assert found["ties"] == {"metric": "ties", **wilson(1, 5)}
    assert set(found) == {"win_rate", "win_rate_similar", "ties"}  # all answers are of one length


def test_by_length_a_judge_of_lengths_is_found_out():
    """It likes what is longer: a rate of 1/2 over all, 1 where ours is longer, 0 where it is shorter."""
    ours, theirs = np.array([20.0, 30, 40, 10, 12, 14]), np.array([10.0, 12, 14, 20, 30, 40])
    found = _table(winrate.rows(winrate.by_scores(ours, theirs), ours, theirs))
    assert found["win_rate"]["value"] == 0.5
    assert (found["win_rate_longer"]["value"], found["win_rate_shorter"]["value"]) == (1, 0)
    assert "win_rate_similar" not in found
    near = _table(winrate.rows(np.array([1.0]), np.array([100.0]), np.array([90.0])))
    assert near["win_rate_similar"]["n"] == 1  # within a tenth of the longer one


def test_both_orders():
    """Ours first / ours second: agree on ours, on theirs, always the first, always the second, undecided."""
    first, second = np.array([0.9, 0.2, 0.8, 0.3, 0.5]), np.array([0.7, 0.4, 0.1, 0.9, 0.5])
    assert winrate.by_both_orders(first, second).tolist() == [1, 0, 0.5, 0.5, 0.5]


def test_a_judge_that_takes_the_first_answer_has_no_verdict_and_is_shown_to_be_one():
    first, second = np.full(20, 0.8), np.full(20, 0.2)
    verdicts = winrate.by_both_orders(first, second)
    assert _table(winrate.rows(verdicts, np.ones(20), np.ones(20)))["win_rate"]["value"] == 0.5
    found = _table(winrate.order_rows(first, second))
    assert found["first_preferred"]["value"] == 1
    assert found["probability"]["value"] == pytest.approx(0.5)
    fair = _table(winrate.order_rows(first, first))
    assert fair["first_preferred"]["value"] == 0.5
    assert fair["probability"]["value"] == pytest.approx(0.8)


def test_the_difference_is_paired():
    """Prompts differ far more than models do: the paired interval sees the difference, those of the means overlap."""
    draw = np.random.default_rng(1)
    hard = draw.normal(0, 5, 200)
    ours, theirs = hard + 0.3 + draw.normal(0, 0.5, 200), hard + draw.normal(0, 0.5, 200)
    found, base = _table(winrate.score_rows(ours, theirs)), _table(winrate.score_rows(theirs, None))
    assert found["score_difference"]["low"] > 0
    assert found["score_difference"]["value"] == pytest.approx((ours - theirs).mean())
    assert found["score"]["low"] < base["score"]["high"]
    assert set(base) == {"score"}
    half = _table(winrate.score_rows(np.array([1.0, NAN, 3.0]), np.array([NAN, 1.0, 1.0])))
    assert (half["score"]["n"], half["score_difference"]["n"]) == (2, 1)
