"""Distances of features and relations: zero for equals, invariances, masks, and exact gradients in float64."""

import math

import pytest
import torch
from torch import Tensor

from ingot.model.attention import causal_mask, document_mask
from ingot.train.relations import (
    gram_distance,
    normalised,
    relation,
    relation_divergence,
    relation_heads,
    squared_distance,
)

B, T, W = 2, 6, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
MASK = document_mask(DOCUMENTS)
PAIRS = MASK | MASK.transpose(1, 2)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rotation(size: int) -> Tensor:
    return torch.linalg.qr(_draw(size, size, seed=9))[0]


def _divergence(student: Tensor, teacher: Tensor, mask: Tensor = MASK) -> Tensor:
    return relation_divergence(*(relation(x, x, mask) for x in (student, teacher)))


def test_the_distance_of_features_is_the_mean_square_of_normalised_states() -> None:
    student, teacher = _draw(5, W), _draw(5, W, seed=1)
    rms = [math.sqrt(sum(float(x) ** 2 for x in row) / W) for row in teacher]
    expected = [
        sum((float(s) - float(t) / r) ** 2 for s, t in zip(a, b, strict=True)) / W
        for a, b, r in zip(student, teacher, rms, strict=True)
    ]
    torch.testing.assert_close(squared_distance(student, teacher), torch.tensor(expected, dtype=torch.float64))
    assert squared_distance(normalised(teacher), 7 * teacher).max() < 1e-20, "whatever the scale of the teacher"


def test_gram_is_the_squared_frobenius_norm_over_T_squared() -> None:
    student, teacher = _draw(1, T, W), _draw(1, T, 3, seed=1)
    tables = [x[0] / x[0].norm(dim=-1, keepdim=True) for x in (student, teacher)]
    a, b = (x @ x.T for x in tables)
    everything = torch.ones(1, T, T, dtype=torch.bool)
    expected = torch.linalg.matrix_norm(a - b) ** 2 / T**2
    torch.testing.assert_close(gram_distance(student, teacher, everything).mean(), expected)


def test_a_relation_is_the_attention_of_its_heads() -> None:
    q, k = _draw(B, 4, T, W), _draw(B, 2, T, W, seed=1)
    keys = torch.stack([k[:, 0], k[:, 0], k[:, 1], k[:, 1]], 1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, keys) / math.sqrt(W)
    expected = scores.masked_fill(~MASK[:, None], -math.inf).softmax(-1)
    torch.testing.assert_close(relation(q, k, MASK).exp(), expected)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gram_is_zero_for_rotated_and_scaled_states_and_for_no_others(scale: float) -> None:
    x = _draw(B, T, W)
    assert gram_distance(scale * x @ _rotation(W), x, PAIRS).max() < 1e-25
    assert gram_distance(torch.cat((x, torch.zeros_like(x)), -1) * scale, x, PAIRS).max() < 1e-25, "widths may differ"
    stretched = x * torch.linspace(1, 2, W, dtype=torch.float64)
    assert gram_distance(stretched, x, PAIRS).mean() > 1e-3


def test_relations_do_not_change_if_heads_rotate() -> None:
    student, teacher = _draw(B, 4, T, W), _draw(B, 4, T, 5, seed=1)
    right = _divergence(student, teacher)
    assert right.min() >= 0
    assert right[0, 0] == right[0, 3] == 0, "the first token of a document attends to itself"
    assert right[:, 1].min() > 1e-3
    torch.testing.assert_close(_divergence(student @ _rotation(W), teacher), right)
    stretched = student * torch.linspace(1, 2, W, dtype=torch.float64)
    assert (_divergence(stretched, teacher) - right).abs().max() > 1e-3
    assert _divergence(student @ _rotation(W), student).abs().max() < 1e-13


@pytest.mark.parametrize("name", ["gram", "relation"])
def test_values_follow_a_permutation_of_the_tokens(name: str) -> None:
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    if name == "gram":
        a, b = _draw(B, T, W), _draw(B, T, W, seed=1)
        found = gram_distance(a[:, order], b[:, order], PAIRS[:, order][:, :, order])
        torch.testing.assert_close(found, gram_distance(a, b, PAIRS)[:, order])
    else:
        a, b = _draw(B, 2, T, W), _draw(B, 2, T, W, seed=1)
        found = _divergence(a[:, :, order], b[:, :, order], MASK[:, order][:, :, order])
        torch.testing.assert_close(found, _divergence(a, b)[:, order])


def test_a_change_in_one_document_changes_no_value_of_another() -> None:
    a, b = _draw(B, T, W), _draw(B, T, W, seed=1)
    changed = a.clone()
    changed[0, 1] += 1
    moved = (gram_distance(changed, b, PAIRS) - gram_distance(a, b, PAIRS)).abs() > 1e-12
    assert moved[0, :3].all()
    assert not moved[0, 3:].any()
    assert not moved[1].any()
    heads = [x.view(B, T, 2, W // 2).transpose(1, 2) for x in (changed, a, b)]
    moved = (_divergence(heads[0], heads[2]) - _divergence(heads[1], heads[2])).abs() > 1e-12
    assert moved.tolist() == [[False, True, True, False, False, False], [False] * T]


def test_relation_heads_are_cut_from_all_heads_side_by_side() -> None:
    x = _draw(B, 3, T, 4)
    cut = relation_heads(x, 2)
    assert cut.shape == (B, 2, T, 6)
    torch.testing.assert_close(cut[0, :, 1].flatten(), x[0, :, 1].flatten())
    assert torch.equal(relation_heads(x, 3), x)


def test_different_numbers_of_heads_compare_mean_probabilities() -> None:
    student, teacher = (
        relation(x, x, causal_mask(T, None, "cpu")[None]) for x in (_draw(1, 4, T, 3), _draw(1, 2, T, 3))
    )
    p, q = teacher.exp().mean(1), student.exp().mean(1)
    expected = torch.where(p > 0, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(-1)
    torch.testing.assert_close(relation_divergence(student, teacher), expected)
    twice = torch.cat((teacher, teacher), 1)
    assert relation_divergence(twice, teacher).abs().max() < 1e-12


def test_gradients_are_exact() -> None:
    states, heads = _draw(B, T, W).requires_grad_(), _draw(B, 4, T, 3).requires_grad_()
    teacher, of_teacher = _draw(B, T, 5, seed=1), _draw(B, 2, T, 6, seed=1)
    projection = _draw(5, W, seed=2).requires_grad_()
    some = PAIRS & (torch.arange(T) != 2)[:, None] & (torch.arange(T) != 2)

    def features(x: Tensor, p: Tensor) -> Tensor:
        return squared_distance(normalised(x) @ p.T, teacher)

    assert torch.autograd.gradcheck(features, (states, projection))
    assert torch.autograd.gradcheck(lambda x: gram_distance(x, teacher, some), (states,))
    right = relation(of_teacher, of_teacher, MASK)
    assert torch.autograd.gradcheck(lambda x: relation_divergence(relation(x, x, MASK), right), (heads,))
    cut = relation(relation_heads(of_teacher, 4), relation_heads(of_teacher, 4), MASK)
    assert torch.autograd.gradcheck(lambda x: relation_divergence(relation(x, x[:, ::2], MASK), cut), (heads,))
