"""Averages of weights: the definition, the plain mean of a short run, and the exchange with the weights."""

import pytest
import torch

from ingot.optim.average import Average


def _walk(steps: int) -> tuple[dict[str, torch.nn.Parameter], list[list[torch.Tensor]]]:
    """Two parameters, and what they are after each step."""
    draw = torch.Generator().manual_seed(0)
    named = {n: torch.nn.Parameter(torch.randn(s, generator=draw).double()) for n, s in (("a", (3, 2)), ("b", (4,)))}
    return named, [[torch.randn(p.shape, generator=draw).double() for p in named.values()] for _ in range(steps)]


def _averaged(decay: float, steps: int) -> tuple[Average, list[list[torch.Tensor]], dict[str, torch.nn.Parameter]]:
    named, walk = _walk(steps)
    average = Average(named, decay)
    for step, weights in enumerate(walk, start=1):
        for parameter, weight in zip(named.values(), weights, strict=True):
            parameter.data.copy_(weight)
        average.update(step)
    return average, walk, named


@pytest.mark.parametrize("steps", [1, 7, 10])
def test_a_short_run_is_the_plain_mean_of_its_steps(steps: int) -> None:
    average, walk, _ = _averaged(0.9, steps)
    for got, *each in zip(average.tensors().values(), *walk, strict=True):
        torch.testing.assert_close(got, torch.stack(each).mean(0))


def test_a_long_run_forgets_by_its_decay() -> None:
    average, walk, _ = _averaged(0.9, 40)
    shares = [0.1 * 0.9**30] * 10 + [0.1 * 0.9 ** (40 - step) for step in range(11, 41)]
    assert sum(shares) == pytest.approx(1)
    for got, *each in zip(average.tensors().values(), *walk, strict=True):
        torch.testing.assert_close(got, sum(s * w for s, w in zip(shares, each, strict=True)))


def test_weights_are_back_after_an_evaluation_and_after_one_that_fails() -> None:
    average, _, named = _averaged(0.5, 6)
    weights, averages = ([t.clone() for t in ts] for ts in (named.values(), average.tensors().values()))
    places = [p.data_ptr() for p in named.values()]

    def evaluation() -> None:
        with average.applied():
            assert all(torch.equal(p, a) for p, a in zip(named.values(), averages, strict=True))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        evaluation()
    assert all(torch.equal(p, w) for p, w in zip(named.values(), weights, strict=True))
    assert all(torch.equal(x, a) for x, a in zip(average.tensors().values(), averages, strict=True))
    assert [p.data_ptr() for p in named.values()] == places


def test_no_decay_keeps_nothing() -> None:
    assert _averaged(0.0, 3)[0].tensors() == {}
