"""Measures of scores against the truth, and Platt's calibration.

Shapes: N documents.
"""

from typing import NamedTuple

import numpy as np

BINS = 10


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0, -x))


class Platt(NamedTuple):
    """The probability sigmoid(slope * score + offset)."""

    slope: float
    offset: float

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """N float64."""
        return sigmoid(self.slope * scores + self.offset)


def platt(scores: np.ndarray, good: np.ndarray) -> Platt:
    """Fit a probability to scores (Platt 1999; Lin, Lin, Weng 2007, Machine Learning 68, 267-276), by Newton's method.

    Both kinds count as equally frequent. Instead of 1 and 0, the targets are (n + 1) / (n + 2) of the n good ones and
    1 / (n + 2) of the n bad ones, which keeps the slope finite if the scores separate them.

    Args:
        scores: N.
        good: N bool, with some of both kinds.
    """
    numbers = good.sum(), (~good).sum()
    targets = np.where(good, (numbers[0] + 1) / (numbers[0] + 2), 1 / (numbers[1] + 2))
    counts = np.where(good, 0.5 / numbers[0], 0.5 / numbers[1])
    middle, spread = scores.mean(), scores.std() or 1.0
    x = np.stack([(scores - middle) / spread, np.ones(len(scores))])

    def loss(w: np.ndarray) -> float:
        return float(counts @ (np.logaddexp(0, w @ x) - targets * (w @ x)))

    w = np.zeros(2)
    for _ in range(100):
        p = sigmoid(w @ x)
        gradient = x @ (counts * (p - targets))
        step = np.linalg.solve((x * (counts * p * (1 - p))) @ x.T + 1e-9 * np.eye(2), gradient)
        while np.abs(step).max() > 1e-9 and loss(w - step) > loss(w):
            step /= 2
        w = w - step
        if np.abs(step).max() <= 1e-9:
            break
    return Platt(float(w[0] / spread), float(w[1] - w[0] * middle / spread))


def auc(scores: np.ndarray, good: np.ndarray) -> float:
    """The probability that a good document has a higher score than a bad one; a tie counts half (Mann-Whitney U)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal scores, from 1
    n_good, n_bad = int(good.sum()), int((~good).sum())
    return float((ranks[inverse][good].sum() - n_good * (n_good + 1) / 2) / (n_good * n_bad))


def log_loss(probabilities: np.ndarray, good: np.ndarray) -> float:
    """Mean -ln p of the truth, in nats, with both kinds equally frequent; ln 2 = 0.693 knows nothing."""
    p = np.clip(np.where(good, probabilities, 1 - probabilities), 1e-12, 1)
    return float(-(np.log(p[good]).mean() + np.log(p[~good]).mean()) / 2)


def calibration_error(probabilities: np.ndarray, good: np.ndarray) -> float:
    """Expected calibration error: the mean of |fraction of good ones - mean probability| over 10 bins of equal width.

    Both kinds count as equally frequent.
    """
    counts = np.where(good, 0.5 / good.sum(), 0.5 / (~good).sum())
    bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, counts * (good - probabilities), minlength=BINS)).sum())
