"""A linear classifier of documents: logistic regression on hashed n-grams (`features.py`), calibrated.

Both sides have the same weight in training, whatever their sizes. The weights minimise

    mean of the good of ln(1 + exp(-w x)) / 2 + mean of the bad of ln(1 + exp(w x)) / 2 + REGULARISATION / (2 N) |w|^2

by Newton's method with conjugate gradients (as LIBLINEAR: Lin, Weng, Keerthi 2008, JMLR 9, 627-650). The probability of
a document is sigmoid(a w x + b) with Platt's a and b, fitted to documents that were not trained on.

Shapes: N documents.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from ingot.corpus.scores.calibration import Platt, platt, sigmoid
from ingot.corpus.scores.features import BUCKETS, Features, features

REGULARISATION = 0.1
MAX_NEWTON_STEPS, MAX_GRADIENT_STEPS = 30, 30
TOLERANCE = 1e-2
"""Norm of the gradient to stop at, as a fraction of the norm at w = 0."""


class Classifier:
    """The probability that a document is one of the good ones, if both kinds are equally frequent."""

    measure, higher_is_better = "probability", True

    def __init__(self, weights: np.ndarray, calibration: Platt):
        self.weights, self.calibration = weights.astype(np.float32), calibration

    def scores(self, texts: pl.Series) -> np.ndarray:
        """The probability of each document, N float32."""
        return self.calibration(features(texts).times(self.weights)).astype(np.float32)

    def tensors(self) -> dict[str, np.ndarray]:
        """The content of its file."""
        return {"weights": self.weights, "calibration": np.array(self.calibration)}

    @classmethod
    def read(cls, tensors: dict[str, Any], measure: str) -> "Classifier":
        return cls(tensors["weights"], Platt(*tensors["calibration"].tolist()))


def train(texts: pl.Series, good: np.ndarray, held_out: pl.Series, held_out_good: np.ndarray) -> Classifier:
    """Train and calibrate a classifier.

    Args:
        texts: documents to train on.
        good: whether each is one of the good ones, N bool; there are some of both kinds.
        held_out: documents to calibrate with.
        held_out_good: the same of these.
    """
    weights = fit(features(texts), good).astype(np.float32)
    return Classifier(weights, platt(features(held_out).times(weights), held_out_good))


def fit(x: Features, good: np.ndarray) -> np.ndarray:
    """The weights of logistic regression, one float64 a bucket."""
    counts = np.where(good, 0.5 / good.sum(), 0.5 / (~good).sum())
    penalty = REGULARISATION / x.number
    w = np.zeros(BUCKETS)
    loss, margins = np.log(2.0), np.zeros(x.number)
    first = 0.0
    for _ in range(MAX_NEWTON_STEPS):
        p = sigmoid(margins)
        gradient = x.transposed_times(counts * (p - good)) + penalty * w
        norm = float(np.sqrt(gradient @ gradient))
        first = first or norm
        if norm <= TOLERANCE * first:
            break
        curvature = counts * p * (1 - p)

        def hessian_times(v: np.ndarray, curvature: np.ndarray = curvature) -> np.ndarray:
            return x.transposed_times(curvature * x.times(v)) + penalty * v

        step = conjugate_gradients(hessian_times, -gradient, min(0.5, np.sqrt(norm / first)) * norm)
        for size in 0.5 ** np.arange(20):
            new = w + size * step
            new_margins = x.times(new)
            signed = np.where(good, new_margins, -new_margins)
            new_loss = float(counts @ np.logaddexp(0, -signed) + penalty / 2 * new @ new)
            if new_loss <= loss + 1e-4 * size * float(gradient @ step):
                break
        else:
            break  # rounding leaves no descent
        w, loss, margins = new, new_loss, new_margins
    return w


def conjugate_gradients(times: Callable[[np.ndarray], np.ndarray], b: np.ndarray, tolerance: float) -> np.ndarray:
    """An approximate solution of A x = b for a positive definite A, given by its products.

    Args:
        times: v -> A v.
        b: the right side.
        tolerance: norm of the residual to stop at.
    """
    x, residual = np.zeros_like(b), b.copy()
    direction, norm = residual.copy(), float(residual @ residual)
    for _ in range(MAX_GRADIENT_STEPS):
        if np.sqrt(norm) <= tolerance:
            break
        product = times(direction)
        size = norm / float(direction @ product)
        x += size * direction
        residual -= size * product
        old, norm = norm, float(residual @ residual)
        direction = residual + norm / old * direction
    return x
