"""Intervals by resampling whole documents, items or prompts: a percentile bootstrap of a ratio of sums.

Tokens of one document are not independent, so an interval over tokens would be far too narrow.
"""

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 1000


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> dict[str, float]:
    """sum / sum with a 95 % bootstrap interval over documents; `n` is their number. Of one document there is none
    to be had: its interval has no width."""
    return interval(*resampled([(numerator, denominator)]), len(numerator))


def resampled(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], seed: int = 0, draws: int = _RESAMPLES
) -> tuple[float, np.ndarray]:
    """sum / sum of the first pair less that of the second (if there is one), and the same of resampled documents.

    A draw takes the same documents for both pairs, so what is hard about a document is in both and cancels.
    """
    n = len(pairs[0][0])
    draw = np.random.default_rng(seed)
    columns = np.array([column for pair in pairs for column in pair], np.float64).T

    def value(sums: np.ndarray) -> np.ndarray:
        ratios = sums[..., 0::2] / np.maximum(sums[..., 1::2], 1e-12)
        return ratios[..., 0] - ratios[..., 1:].sum(-1)

    found = float(value(columns.sum(0)))
    if n < 2 or not draws:
        return found, np.full(draws, found)
    drawn = [np.bincount(draw.integers(0, n, n), minlength=n) @ columns for _ in range(draws)]
    return found, value(np.array(drawn))


def interval(value: float, draws: np.ndarray, n: int) -> dict[str, float]:
    """A value with the 95 % interval of its draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high), "n": n}
