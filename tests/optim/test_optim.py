"""Schedule, groups, clipping: the numbers of D3, D5, D6."""

import math

import pytest
import torch

from ingot.optim.groups import adamw, clip_, counts, decays, global_norm, groups
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.train.guard import judge


def test_D5_warmup() -> None:
    schedule = Schedule("cosine", 3e-4, 3e-5, 1000, 10_000)
    assert schedule.lr(1) == pytest.approx(3e-7)
    assert schedule.lr(500) == pytest.approx(1.5e-4)
    assert schedule.lr(1000) == pytest.approx(3e-4)


def test_D5_the_first_update_moves() -> None:
    """All zero-based listings have lr 0 on the first update; steps here are 1-based."""
    assert Schedule("cosine", 3e-4, 0, 1000, 10_000).lr(1) > 0


def test_D5_cosine_start_half_end_and_floor() -> None:
    schedule = Schedule("cosine", 3e-4, 1e-5, 0, 1000)
    assert [schedule.lr(t) for t in (0, 500, 1000)] == pytest.approx([3e-4, 1.55e-4, 1e-5])
    assert schedule.lr(1500) == schedule.lr(10**6) == pytest.approx(1e-5)  # 000, 001, 002 climb again past the end


def test_D5_continuous_at_the_joint() -> None:
    """t / T instead of (t - W) / (D - W) would drop to 2.929e-4 right after the warmup."""
    schedule = Schedule("cosine", 3e-4, 0, 1000, 10_000)
    assert schedule.lr(1000) - schedule.lr(1001) < 1e-10
    wrong = 1e-5 + 0.5 * (3e-4 - 1e-5) * (1 + math.cos(math.pi * 1000 / 10_000))
    assert wrong == pytest.approx(2.929e-4, abs=1e-7)


def test_D5_gpt2_600k() -> None:
    schedule = Schedule("cosine", 6e-4, 6e-5, 2000, 600_000)
    thousands = (50, 100, 200, 300, 400, 500)
    expected = (5.915e-4, 5.650e-4, 4.666e-4, 3.314e-4, 1.958e-4, 0.964e-4)
    assert [schedule.lr(1000 * k) for k in thousands] == pytest.approx(expected, abs=5e-8)
    assert schedule.lr(600_000) == pytest.approx(6e-5)


def test_D5_linear_and_constant() -> None:
    assert Schedule("linear", 1.0, 0.0, 0, 100).lr(25) == pytest.approx(0.75)
    assert Schedule("constant", 1.0, 0.1, 10, 100).lr(5) == pytest.approx(0.5)
    assert Schedule("constant", 1.0, 0.1, 10, 100).lr(10**6) == 1.0


def _model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(7, 4)
    model.linear = torch.nn.Linear(4, 3)
    model.anything = torch.nn.LayerNorm(3)
    model.lora_a = torch.nn.Parameter(torch.zeros(4, 2))
    return model


def test_D3_what_decays() -> None:
    """By shape, so that a norm called otherwise is found too; adapters are exempt; embeddings by a named setting."""
    named = dict(_model().named_parameters())
    assert {n for n, p in named.items() if decays(n, p)} == {"embedding.weight", "linear.weight"}
    assert {n for n, p in named.items() if decays(n, p, embeddings=False)} == {"linear.weight"}
    assert counts(named, OptimSettings()) == {"decayed_parameters": 28 + 12, "undecayed_parameters": 3 + 6 + 8}
    frozen = dict(named)
    frozen["linear.weight"].requires_grad_(False)
    assert sum(len(g["params"]) for g in groups(frozen, OptimSettings())) == len(named) - 1


def test_D3_decay_is_one_minus_lr_lambda() -> None:
    """theta 2, lambda .01, lr 1e-3: 2e-5 off, not .02 (000: minus lambda theta; 002: times 1 - lambda)."""
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0, dtype=torch.float64))
    optimizer = adamw({"w": weight}, OptimSettings(weight_decay=0.01), lr=1e-3)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert 2.0 - weight.item() == pytest.approx(2e-5, rel=1e-3)


def test_D6_clipping() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([0.0])]
    norm = global_norm(gradients)
    clip_(gradients, 1.0, norm)
    assert norm.item() == pytest.approx(5.0)  # the norm before clipping is what is logged
    assert torch.cat(gradients).tolist() == pytest.approx([0.6, 0.8, 0.0])


def test_D6_a_short_gradient_is_left_alone() -> None:
    gradients = [torch.tensor([0.3, 0.4])]
    clip_(gradients, 1.0, global_norm(gradients))
    assert torch.equal(gradients[0], torch.tensor([0.3, 0.4]))


def test_D6_health() -> None:
    assert judge([0.5, 0.9, 1.4, 0.8], clip=1.0) == "healthy"
    assert judge([2.0] * 20, clip=1.0) == "always clipped"
    assert judge([0.5, math.nan], clip=1.0) == "critical"
    assert judge([0.5, math.inf], clip=1.0) == "critical"
    assert judge([], clip=1.0) == "healthy"
