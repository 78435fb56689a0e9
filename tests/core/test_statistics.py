"""Intervals of a few runs, against tables, closed forms and a count of how often they cover the truth."""

import math
import random

import pytest

from ingot.core.statistics import incomplete_beta, mean_interval, paired_difference, t_probability, t_quantile


@pytest.mark.parametrize(
    ("p", "degrees", "value"),
    [
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.3026527297),
        (0.975, 3, 3.1824463053),
        (0.975, 4, 2.7764451052),
        (0.975, 9, 2.2621571628),
        (0.975, 30, 2.0422724563),
        (0.95, 5, 2.0150483733),
        (0.995, 10, 3.1692726726),
        (0.975, 1e6, 1.9599663),
    ],
)
def test_quantiles_of_the_printed_tables(p: float, degrees: float, value: float) -> None:
    assert t_quantile(p, degrees) == pytest.approx(value, abs=2e-6 if degrees > 1e5 else 1e-9)
    assert t_quantile(1 - p, degrees) == pytest.approx(-value, abs=2e-6 if degrees > 1e5 else 1e-9)


def test_quantiles_of_closed_forms() -> None:
    """One degree is Cauchy's distribution; two have an algebraic inverse."""
    for p in (0.01, 0.3, 0.5, 0.8, 0.999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9, abs=1e-12)
        two = (2 * p - 1) / math.sqrt(2 * p * (1 - p))
        assert t_quantile(p, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)
        for degrees in (1, 2, 7, 40):
            assert t_probability(t_quantile(p, degrees), degrees) == pytest.approx(p, abs=1e-12)


def test_incomplete_beta_of_closed_forms() -> None:
    for x in (0.0, 1e-6, 0.2, 0.5, 0.9, 1.0):
        assert incomplete_beta(1, 1, x) == pytest.approx(x)
        assert incomplete_beta(3, 1, x) == pytest.approx(x**3)
        assert incomplete_beta(2, 2, x) == pytest.approx(3 * x**2 - 2 * x**3)


def test_an_interval_by_hand() -> None:
    """2, 4, 9: mean 5, s^2 = 13, half width 4.3027 * sqrt(13 / 3)."""
    found = mean_interval([2.0, 4.0, 9.0])
    assert (found.mean, found.n) == (5.0, 3)
    assert found.half == pytest.approx(4.302652729696 * math.sqrt(13 / 3))
    alone = mean_interval([3.0])
    assert (alone.mean, alone.low, alone.high, alone.half, alone.n) == (3.0, None, None, None, 1)


def test_intervals_of_three_cover_the_mean_95_times_in_100_and_the_normals_do_not() -> None:
    draw = random.Random(5)
    covered = normal = 0
    for _ in range(4000):
        found = mean_interval([draw.gauss(1.0, 2.0) for _ in range(3)])
        assert found.half is not None
        covered += abs(found.mean - 1.0) <= found.half
        normal += abs(found.mean - 1.0) <= found.half / t_quantile(0.975, 2) * 1.96
    assert 0.94 < covered / 4000 < 0.96
    assert normal / 4000 < 0.85  # the control: the factor matters


def test_pairs_cancel_what_seeds_fraction() -> None:
    """Seeds differ by units, the setting by a tenth: unpaired intervals overlap, the paired one is far from 0."""
    before = {1: 3.0, 2: 5.0, 3: 7.0}
    after = {3: 6.91, 2: 4.90, 1: 2.89, 4: 1.0}
    found = paired_difference(before, after)
    assert found is not None
    assert (found.n, found.mean) == (3, pytest.approx(-0.1))
    assert found.high is not None
    assert found.high < 0
    apart = mean_interval(list(before.values()))
    assert apart.half is not None
    assert apart.half > 1
    assert paired_difference(before, {9: 1.0}) is None
