"""F1, F2, F5, A7, D9: the numbers of the sources, and of our own models."""

from dataclasses import dataclass, replace

import pytest

from ingot.plan.arithmetic import (
    activation_bytes,
    forward_flops,
    parameters,
    score_elements,
    state_bytes,
    training_flops,
    training_flops_per_token,
)

BILLION = 10**9


@dataclass(frozen=True)
class Shape:
    vocab: int
    depth: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    tied: bool


FULL_SIZE = Shape(128_000, 32, 4096, 32, 32, 11_008, 4096, tied=False)


def test_A7_bytes_of_an_embedding():
    for vocab, gigabytes in ((100_000, 1.64), (1_000_000, 16.4)):
        embedding = parameters(replace(FULL_SIZE, vocab=vocab)).embedding
        assert state_bytes(embedding).weights / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_F1_forward_of_70B():
    assert forward_flops(70 * BILLION, 4096) == pytest.approx(5.7e14, rel=0.01)
    assert training_flops(70 * BILLION, 4096) == 3 * forward_flops(70 * BILLION, 4096)


def test_F1_compute_of_the_published_runs():
    """001's table is off by factors of 8 to 70 for these; C = 6 N D gives them."""
    runs = ((1, 20e9, 1.2e20), (7, 1.4e12, 5.88e22), (70, 1.4e12, 5.88e23), (400, 3e12, 7.2e24))
    for billions, tokens, flops in runs:
        assert training_flops(billions * BILLION, int(tokens)) == pytest.approx(flops, rel=1e-3)


def test_F1_flops_of_a_step_with_attention():
    """The small shapes of the benchmark (GELU, 4 d): SwiGLU at 8/3 d has the same matrices when ffn = 8/3 d exactly."""
    shape = Shape(65, 4, 384, 6, 6, 1024, 256, tied=True)
    matrices = 4 * (4 * 384 * 384 + 3 * 384 * 1024) + 9 * 384 + 65 * 384
    assert training_flops_per_token(shape) == 6 * matrices + 12 * 4 * 384 * 256
    assert training_flops_per_token(replace(shape, tied=False)) == training_flops_per_token(shape)


def test_F2_memory_of_70B():
    memory = state_bytes(70 * BILLION)
    assert memory.weights == 280 * BILLION
    assert memory.moments == 560 * BILLION
    assert memory.gradients == 280 * BILLION
    assert memory.master == 0
    assert memory.total == 1120 * BILLION


def test_F2_half_precision_halves_the_weights_and_not_the_state():
    half = state_bytes(70 * BILLION, weight_bytes=2)
    assert half.weights == 140 * BILLION
    assert half.master == 280 * BILLION
    assert half.total == state_bytes(70 * BILLION).total


def test_F2_D9_activations_of_70B():
    linear = activation_bytes(depth=80, width=8192, heads=64, context=4096)
    assert linear / 1e9 == pytest.approx(91, abs=0.5)
    whole = activation_bytes(depth=80, width=8192, heads=64, context=4096, fused=False)
    assert (whole - linear) / 1e9 == pytest.approx(429, abs=1)


def test_D8_written_out_scores_are_quadratic():
    assert score_elements(heads=8, context=2048) == 4 * score_elements(heads=8, context=1024)


def test_F5_parameters_of_the_full_size():
    """001's d_ff of 10,952 gives its 7.50B; so does 10,944, and 11,008, the size in use, 7.52B."""
    for ffn, billions in ((10_952, 7.50), (10_944, 7.50), (11_008, 7.52)):
        part = parameters(replace(FULL_SIZE, ffn=ffn))
        assert round(part.total / 1e9, 2) == billions
    part = parameters(FULL_SIZE)
    assert part.embedding == part.head == 128_000 * 4096
    assert parameters(replace(FULL_SIZE, tied=True)).total == part.total - part.head


def test_F5_tokens_of_a_step():
    assert 512 * FULL_SIZE.context == 2_097_152
    assert 512 * FULL_SIZE.context * 1_000_000 == pytest.approx(2.097e12, rel=1e-3)
