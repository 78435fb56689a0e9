"""Confidence intervals for the means of a few runs, by Student's t.

For three runs the factor is 4.30 where the normal distribution's is 1.96, so a normal interval would be less than half
as wide as it should be. The quantile is computed by bisection on the regularised incomplete beta function.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

UPPER = 0.975
"""The quantile at the upper end of a 95 % interval."""


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values and its 95 % interval; `low` and `high` are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        """Half of the interval's width."""
        return None if self.high is None else self.high - self.mean


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and t-interval of independent values: mean ± t(n - 1) * s / sqrt(n)."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = t_quantile(UPPER, n - 1) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def wilson(successes: float, n: int) -> dict[str, float]:
    """A proportion with Wilson's interval (1927), which holds for few items and for proportions near 0 and 1.

    Args:
        successes: number of successes; a tie may count as half of one.
        n: number of items.

    Returns:
        value, low, high, n.
    """
    if n == 0:
        return {"value": 0.0, "low": 0.0, "high": 1.0, "n": 0}
    z = NormalDist().inv_cdf(UPPER)
    p, extra = successes / n, z * z / n
    middle = (p + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(p * (1 - p) / n + extra / (4 * n))
    return {"value": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "n": n}


def paired_difference(before: Mapping[object, float], after: Mapping[object, float]) -> Interval | None:
    """Interval of `after - before` over the keys (seeds) that both have; None if they have none in common.

    Effects of the seed, such as the order of the data, cancel within a pair. So this test is more powerful than a
    comparison of two separate intervals.
    """
    common = [key for key in before if key in after]
    return mean_interval([after[key] - before[key] for key in common]) if common else None


@lru_cache(256)
def t_quantile(p: float, degrees: float) -> float:
    """The value that Student's t with `degrees` > 0 degrees of freedom stays below with probability p in (0, 1)."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1 - p, degrees)
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < p:
        high *= 2
    while low < (middle := (low + high) / 2) < high:  # until adjacent floats
        low, high = (middle, high) if t_probability(middle, degrees) < p else (low, middle)
    return high


def t_probability(t: float, degrees: float) -> float:
    """P(T <= t): 1 - I_x(v/2, 1/2) / 2 with x = v / (v + t^2) for t >= 0 (Abramowitz and Stegun 26.7.1, 26.5.27)."""
    tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return 1 - tail if t >= 0 else tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b) by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges quickly only below this x
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * value / a
