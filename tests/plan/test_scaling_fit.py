"""The fit of a scaling law: known laws are recovered, with noise and with a bad run; a wrong law predicts worse."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.plan.scaling import LAWS, Law
from ingot.plan.scaling_fit import Fit, TrainedModel, fit

TINY = Law(E=1.1, A=60.0, B=300.0, alpha=0.38, beta=0.42)
"""A law with losses like those of models of this size."""


def _runs(law: Law, sizes: Sequence[float], tokens: Sequence[float], noise: float = 0.0) -> list[TrainedModel]:
    random = np.random.default_rng(3)
    return [
        TrainedModel(n, d, law.loss(n, d) * math.exp(noise * random.standard_normal())) for n in sizes for d in tokens
    ]


@pytest.mark.parametrize(
    ("law", "sizes", "tokens"),
    [
        (TINY, (5e4, 1e5, 4e5, 1e6), (2e5, 5e5, 1e6, 2e6)),
        (LAWS["hoffmann"], (5e7, 2e8, 1e9, 1e10), (1e9, 5e9, 3e10, 2e11)),
        (LAWS["besiroglu"], (5e7, 2e8, 1e9, 1e10), (1e9, 5e9, 3e10, 2e11)),
    ],
)
def test_known_constants_are_recovered(law: Law, sizes: Sequence[float], tokens: Sequence[float]) -> None:
    found = fit(_runs(law, sizes, tokens), bootstraps=2)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=0.02), name
    assert found.error < 1e-5


@pytest.fixture(scope="module")
def noisy() -> Fit:
    """Sixteen runs with the noise of a seed, half a per cent."""
    return fit(_runs(TINY, (5e4, 1e5, 4e5, 1e6), (2e5, 5e5, 1e6, 2e6), noise=0.005))


def test_with_noise_intervals_cover_the_truth_and_a_larger_run_is_predicted(noisy: Fit) -> None:
    for name in ("E", "alpha", "beta"):
        low, high = noisy.interval(name)
        assert low < getattr(TINY, name) < high, name
    truth = TINY.loss(3e6, 6e6)
    assert noisy.law.loss(3e6, 6e6) == pytest.approx(truth, rel=0.02)
    low, high = noisy.loss_interval(3e6, 6e6)
    assert low < truth < high


def test_control_a_law_with_a_wrong_exponent_does_not_predict_it() -> None:
    """The same runs under a law whose alpha is fixed at twice the true one: E, A, B, beta cannot make up for it."""
    runs = _runs(TINY, (5e4, 1e5, 4e5, 1e6), (2e5, 5e5, 1e6, 2e6))
    truth = TINY.loss(1e7, 2e7)
    assert fit(runs, bootstraps=2).law.loss(1e7, 2e7) == pytest.approx(truth, rel=0.001)
    loss = np.array([r.loss for r in runs])
    columns = np.array([[1, r.parameters ** -(2 * TINY.alpha), r.tokens**-TINY.beta] for r in runs])
    E, A, B = np.linalg.lstsq(columns, loss, rcond=None)[0]
    assert Law(E, A, B, 2 * TINY.alpha, TINY.beta).loss(1e7, 2e7) != pytest.approx(truth, rel=0.02)


def test_one_bad_run_does_not_bend_the_law() -> None:
    runs = _runs(TINY, (5e4, 1e5, 4e5, 1e6), (2e5, 5e5, 1e6, 2e6))
    bad = TrainedModel(runs[5].parameters, runs[5].tokens, runs[5].loss * 1.5)
    found = fit([*runs[:5], bad, *runs[6:]], bootstraps=2).law
    assert found.loss(3e6, 6e6) == pytest.approx(TINY.loss(3e6, 6e6), rel=0.005)


def test_too_few_runs_or_a_diverged_one_is_one_sentence() -> None:
    with pytest.raises(UserError, match="found 4 finished runs of 2 sizes and 2 lengths, expected at least 6 runs"):
        fit(_runs(TINY, (1e5, 1e6), (1e5, 1e6)))
    with pytest.raises(UserError, match="found a loss of nan"):
        fit([*_runs(TINY, (1e5, 2e5, 4e5), (1e5, 2e5, 4e5)), TrainedModel(1e5, 1e5, math.nan)])
