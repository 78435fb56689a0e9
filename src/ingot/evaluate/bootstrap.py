"""Percentile bootstrap intervals of ratios of sums, by resampling documents (or items, or prompts).

Tokens of one document are not independent, so resampling tokens would give far too narrow intervals.
"""

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 1000


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> dict[str, float]:
    """sum(numerator) / sum(denominator) with a 95 % bootstrap interval over documents.

    Args:
        numerator: one value per document.
        denominator: one value per document.

    Returns:
        `value`, `low`, `high`, and `n`, the number of documents. A single document gives an interval of width 0.
    """
    return interval(*resample([(numerator, denominator)]), len(numerator))


def resample(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], seed: int = 0, draws: int = _RESAMPLES
) -> tuple[float, np.ndarray]:
    """The ratio of the first pair, minus that of the second if there is one; and the same of each bootstrap draw.

    A draw takes the same documents for both pairs, so differences in difficulty between documents cancel.

    Args:
        pairs: one or two (numerator, denominator), each one value per document.
    """
    n = len(pairs[0][0])
    draw = np.random.default_rng(seed)
    columns = np.array([column for pair in pairs for column in pair], np.float64).T

    def value(sums: np.ndarray) -> np.ndarray:
        ratios = sums[..., 0::2] / np.maximum(sums[..., 1::2], 1e-12)
        return ratios[..., 0] - ratios[..., 1:].sum(-1)

    estimate = float(value(columns.sum(0)))
    if n < 2 or not draws:
        return estimate, np.full(draws, estimate)
    sums = [np.bincount(draw.integers(0, n, n), minlength=n) @ columns for _ in range(draws)]
    return estimate, value(np.array(sums))


def interval(value: float, draws: np.ndarray, n: int) -> dict[str, float]:
    """A value with the 95 % percentile interval of its bootstrap draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high), "n": n}
