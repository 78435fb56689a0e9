"""Coins: their share, their independence, that the compiler leaves them as they are, and what they cost."""

import math
import time

import pytest
import torch
import torch.nn.functional as F

from ingot.backends.select import compiled
from ingot.model.config import ModelSettings
from ingot.model.dropout import dropout
from ingot.model.transformer import build

OPTIONS = {"fallback_random": True}
"""What `compiled` tells the compiler on a CPU."""


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_that_share_is_zero_and_the_mean_stays(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out = dropout(torch.ones(999, 1001, dtype=dtype), share)
    kept = out != 0
    n = kept.numel()
    assert n % 4, "the last draw is not used up"
    assert abs(kept.double().mean() - (1 - share)) < 4 * math.sqrt(share * (1 - share) / n) + 2**-17
    scale = torch.tensor(1 / (1 - share), dtype=dtype)
    torch.testing.assert_close(out[kept].unique(), scale[None], rtol=2**-16 / (1 - share), atol=0.0)


def test_a_share_of_nearly_all_is_less_than_all() -> None:
    """Settings allow every share below 1; rounded up to 1, the scale would be a division by zero."""
    out = dropout(torch.ones(1000, 1000), 1 - 1e-7)
    assert set(out.unique().tolist()) <= {0.0, 65_536.0}


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 1001])
def test_coins_know_nothing_of_each_other(apart: int) -> None:
    """Four come from one draw: the correlation of coins at any distance is that of noise."""
    torch.manual_seed(0)
    kept = dropout(torch.ones(1000, 1001), 0.3).flatten() != 0
    pair = torch.corrcoef(torch.stack([kept[apart:], kept[:-apart]]).double())[0, 1].item()
    assert abs(pair) < 4 / math.sqrt(len(kept))


def test_the_gradient_goes_where_the_numbers_went() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 7, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.4)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach() / x.detach())


def test_off_it_is_its_input() -> None:
    x = torch.randn(3, 5)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x


def test_compiled_it_draws_twice_for_one_tensor() -> None:
    """As LoRA's q, k and v do; a compiler that thinks two draws one would leave 0 and 6 alone."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return dropout(x, 0.5) + 2 * dropout(x, 0.5)

    found = []
    for how in (twice, torch.compile(twice, options=OPTIONS)):
        x = torch.ones(64, 33, requires_grad=True)
        torch.manual_seed(1)
        out = how(x)
        out.sum().backward()
        assert torch.equal(x.grad, out)
        found.append(out.detach())
    assert torch.equal(*found)
    assert set(found[0].unique().tolist()) == {0.0, 2.0, 4.0, 6.0}


def test_a_compiled_model_drops_what_the_plain_one_drops() -> None:
    """Control: another seed. GPT-2's, whose GELU is computed otherwise by the compiler."""
    shape = ModelSettings(family="gpt2", depth=1, width=16, heads=2, context=12, dropout=0.3)
    model = build(shape.resolve(32), seed=1, dtype=torch.float32).train()
    ids = torch.arange(24).view(2, 12)
    found = []
    for forward, seed in ((model, 1), (compiled(model, "whole"), 1), (model, 2)):
        torch.manual_seed(seed)
        hidden = forward(ids).hidden
        hidden.sum().backward()
        found.append((hidden.detach(), model.get_parameter("embedding.weight").grad))
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert (found[2][0] - found[0][0]).abs().max() > 0.1


@pytest.mark.timing
def test_a_coin_costs_half_of_torchs() -> None:
    """Compiled, forward and backward, one thread, by its own clock; alternating, the quicker half of 16.

    With AVX2 alone .53: softmax in bf16, which is emulated there, is a larger part of both.
    """

    def seconds(step) -> float:
        start = time.thread_time()
        step()
        return time.thread_time() - start

    x = torch.randn(64, 4, 64, 64).bfloat16().requires_grad_()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = []
        for how in (dropout, F.dropout):
            compiled = torch.compile(lambda x, how=how: how(torch.softmax(x, -1), 0.1), options=OPTIONS)
            steps.append(lambda compiled=compiled: compiled(x).sum().backward())
            steps[-1]()
        ours, theirs = zip(*[[seconds(step) for step in steps] for _ in range(16)], strict=True)
    finally:
        torch.set_num_threads(threads)
    most = 0.5 if torch.cpu._is_avx512_supported() else 0.65
    assert sum(sorted(ours)[:8]) < most * sum(sorted(theirs)[:8])
