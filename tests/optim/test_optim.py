"""Groups and clipping: the numbers of D3 and D6."""

import math

import pytest
import torch

from ingot.optim.groups import clip_, decay_counts, decays, global_norm, groups
from ingot.optim.settings import OptimSettings


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
    assert decay_counts(named, OptimSettings()) == {"decayed_parameters": 28 + 12, "undecayed_parameters": 3 + 6 + 8}
    frozen = dict(named)
    frozen["linear.weight"].requires_grad_(False)
    assert sum(len(g["params"]) for g in groups(frozen, OptimSettings())) == len(named) - 1


def test_D3_source_error_a_list_of_names_misses_norms() -> None:
    """001 exempts names with "bias", "layer_norm.weight" or "lm_head.weight": its own norm1 and norm2 decay."""
    block = torch.nn.Module()
    block.norm1, block.attention = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    named = dict(block.named_parameters())
    theirs = {n for n in named if not any(word in n for word in ("bias", "layer_norm.weight", "lm_head.weight"))}
    assert theirs == {"norm1.weight", "attention.weight"}
    assert {n for n, p in named.items() if decays(n, p)} == {"attention.weight"}


def test_D6_clipping() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([0.0])]
    norm = global_norm(gradients)
    clip_(gradients, 1.0, norm)
    assert norm.item() == pytest.approx(5.0)  # the norm before clipping is what is logged
    assert torch.cat(gradients).tolist() == pytest.approx([0.6, 0.8, 0.0])


def test_D6_the_norm_of_a_large_matrix() -> None:
    """Where all squares go into a few fp32 numbers the last ones are lost: torch's own norm of these is .07 % short."""
    gradient = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = gradient.double().norm().item()
    assert global_norm([gradient, torch.zeros(3)]).item() == pytest.approx(expected, rel=2e-6)
    assert global_norm([gradient.T]).item() == pytest.approx(expected, rel=2e-6)


def test_D6_a_short_gradient_is_left_alone() -> None:
    gradients = [torch.tensor([0.3, 0.4])]
    clip_(gradients, 1.0, global_norm(gradients))
    assert torch.equal(gradients[0], torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("limit", [0.01, 1.0, 4.9, 5.1])
def test_D6_the_factor_is_the_smaller_of_one_and_limit_over_norm(limit: float) -> None:
    gradients = [torch.tensor([3.0, 4.0], dtype=torch.float64)]
    clip_(gradients, limit, global_norm(gradients))
    assert gradients[0].norm().item() == pytest.approx(min(1.0, limit / 5.0) * 5.0, rel=1e-12)


def test_D6_a_norm_that_is_no_number_is_not_taken_for_a_short_one() -> None:
    gradients = [torch.tensor([math.nan, 4.0])]
    clip_(gradients, 1.0, global_norm(gradients))
    assert gradients[0].isnan().all()


def test_D6_source_error_torch_returns_the_norm_before_clipping() -> None:
    """003 reads the returned value as the norm after it ("healthy: < 1 after clipping"), which is never above 1."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0])
    assert torch.nn.utils.clip_grad_norm_([parameter], 1.0).item() == pytest.approx(5.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0)
