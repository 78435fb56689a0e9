"""Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, with bootstrap intervals.

As Hoffmann et al. 2022 (appendix D.3): the Huber loss of log L, with the logarithms of E, A and B as parameters and
from several starts, of which the best counts. Their optimiser is L-BFGS; here it is Levenberg-Marquardt on reweighted
residuals, for all starts and all bootstrap samples at once. numpy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import UserError
from ingot.plan.scaling import Law

HUBER = 1e-3
"""Residual of log L from which it counts linearly, as Hoffmann et al.'s: one bad run does not bend the law."""
MIN_RUNS = 6
"""Runs of a fit: one more than a law has constants."""
BOOTSTRAPS = 200
"""Samples of the runs that intervals are computed from."""
STEPS = 150
"""Of the optimiser."""
STARTS = tuple(product((0.1, 0.3, 0.7, 1.2), (0.1, 0.3, 0.7, 1.2), (0.2, 0.6)))
"""alpha, beta, and E as a fraction of the lowest loss. A and B of a start share the rest of the mean loss."""
EXPONENTS = (1e-3, 5.0)
"""Bounds of alpha and beta."""
LEAST_EXPONENT = 0.02
"""An exponent of at most this says that there is no effect, or none beyond the noise."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class TrainedModel:
    """A run that a law is fitted to."""

    parameters: float
    tokens: float
    loss: float
    """Held-out nats per token."""


@dataclass(frozen=True)
class Fit:
    """A law with its bootstrap samples."""

    law: Law
    samples: tuple[Law, ...]
    """A law of each bootstrap sample of the runs."""
    error: float
    """Mean absolute relative error of the loss, on the runs of the fit."""

    def interval(self, constant: str) -> tuple[float, float]:
        """95 % interval of a constant."""
        return _percentiles([getattr(law, constant) for law in self.samples])

    def loss_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """95 % interval of a predicted loss."""
        return _percentiles([law.loss(parameters, tokens) for law in self.samples])


def undetermined(law: Law) -> set[str]:
    """What the runs do not tell the effect of: size, length."""
    exponents = {"size": law.alpha, "length": law.beta}
    return {what for what, found in exponents.items() if not LEAST_EXPONENT < found < EXPONENTS[1]}


def fit(runs: Sequence[TrainedModel], bootstraps: int = BOOTSTRAPS, seed: int = 0) -> Fit:
    """The law of some runs.

    Args:
        runs: at least `MIN_RUNS`, of at least three sizes and three lengths.
        bootstraps: samples of the runs, with replacement, that intervals are computed from.
        seed: of the bootstrap.

    Raises:
        UserError: there are too few runs, or a loss is not a positive number.
    """
    sizes, lengths = {r.parameters for r in runs}, {r.tokens for r in runs}
    if len(runs) < MIN_RUNS or min(len(sizes), len(lengths)) < 3:
        raise UserError(
            f"found {len(runs)} finished runs of {len(sizes)} sizes and {len(lengths)} lengths, expected at least "
            f"{MIN_RUNS} runs of 3 sizes and 3 lengths to fit a law to; add sizes or durations to [sweep]"
        )
    if bad := [r.loss for r in runs if not 0 < r.loss < np.inf]:
        raise UserError(f"found a loss of {bad[0]}, expected a positive number; leave the run that diverged out")
    log_n, log_d, log_loss = (np.log([getattr(r, f) for r in runs]) for f in ("parameters", "tokens", "loss"))
    once = np.ones((len(STARTS), len(runs)))
    starts = np.array([_start(*start, log_n, log_d, log_loss) for start in STARTS])
    found, objective = _levenberg_marquardt(starts, once, log_n, log_d, log_loss)
    best = found[np.argmin(objective)]
    draws = np.random.default_rng(seed).multinomial(len(runs), [1 / len(runs)] * len(runs), bootstraps)
    again, _ = _levenberg_marquardt(np.tile(best, (bootstraps, 1)), draws.astype(float), log_n, log_d, log_loss)
    law = _law(best)
    error = float(np.mean([abs(law.loss(r.parameters, r.tokens) / r.loss - 1) for r in runs]))
    return Fit(law, tuple(map(_law, again)), error)


def _start(alpha: float, beta: float, entropy: float, log_n: Array, log_d: Array, log_loss: Array) -> list[float]:
    """log E, log A, log B, alpha, beta of a law through the mean of the runs."""
    low = log_loss.min()
    half = np.log(np.exp(log_loss).mean() - entropy * np.exp(low)) - np.log(2)
    return [np.log(entropy) + low, half + alpha * log_n.mean(), half + beta * log_d.mean(), alpha, beta]


def _levenberg_marquardt(
    start: Array, counts: Array, log_n: Array, log_d: Array, log_loss: Array
) -> tuple[Array, Array]:
    """Minimise the Huber loss of each row of `start` by damped Gauss-Newton steps.

    Args:
        start: (problems, 5): log E, log A, log B, alpha, beta.
        counts: (problems, runs): how often each run counts.
        log_n, log_d, log_loss: (runs,).

    Returns:
        the minima (problems, 5) and their Huber losses (problems,).
    """
    at, damping = start.copy(), np.full(len(start), 1e-2)
    objective = _objective(at, counts, log_n, log_d, log_loss)
    for _ in range(STEPS):
        residual, jacobian = _residuals(at, log_n, log_d, log_loss)
        weight = counts * np.minimum(1, HUBER / np.maximum(np.abs(residual), 1e-12))
        gradient = np.einsum("pr,pr,prc->pc", weight, residual, jacobian)
        hessian = np.einsum("pr,prc,prd->pcd", weight, jacobian, jacobian)
        scale = np.einsum("pcc->pc", hessian)
        hessian += damping[:, None, None] * (scale + 1e-9)[:, :, None] * np.eye(start.shape[1])
        trial = at - np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
        trial[:, 3:] = np.clip(trial[:, 3:], *EXPONENTS)
        value = _objective(trial, counts, log_n, log_d, log_loss)
        better = value < objective
        at[better], objective[better] = trial[better], value[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-10, 1e10)
    return at, objective


def _residuals(at: Array, log_n: Array, log_d: Array, log_loss: Array) -> tuple[Array, Array]:
    """log of the law minus log of the loss (problems, runs), and its derivatives (problems, runs, 5)."""
    terms = np.stack(
        [
            np.broadcast_to(at[:, :1], (len(at), len(log_n))),
            at[:, 1:2] - at[:, 3:4] * log_n,
            at[:, 2:3] - at[:, 4:5] * log_d,
        ],
        axis=2,
    )
    predicted = np.logaddexp.reduce(terms, axis=2)
    parts = np.exp(terms - predicted[:, :, None])  # the fraction of E, A / N^alpha and B / D^beta in the loss
    slopes = -parts[:, :, 1:] * np.stack([log_n, log_d], axis=1)
    return predicted - log_loss, np.concatenate([parts, slopes], axis=2)


def _objective(at: Array, counts: Array, log_n: Array, log_d: Array, log_loss: Array) -> Array:
    """The Huber loss of each problem."""
    size = np.abs(_residuals(at, log_n, log_d, log_loss)[0])
    return (counts * np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))).sum(axis=1)


def _law(at: Array) -> Law:
    entropy, size, text, alpha, beta = map(float, at)
    return Law(float(np.exp(entropy)), float(np.exp(size)), float(np.exp(text)), alpha, beta)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)
