"""F2, D4, D7, D8, D9, A7: bytes, the numbers of the sources."""

import pytest

from ingot.plan.memory import cache_bytes, score_elements, state_bytes

BILLION = 10**9


def test_a7_bytes_of_an_embedding():
    for vocab, gigabytes in ((50_000, 0.8192), (100_000, 1.64), (1_000_000, 16.4)):
        assert state_bytes(vocab * 4096).weights / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    assert state_bytes(50_000 * 4096).weights == 819_200_000


def test_f2_d4_state_of_70B():
    memory = state_bytes(70 * BILLION)
    assert memory.weights == 280 * BILLION
    assert memory.gradients == 280 * BILLION
    assert memory.moments == 560 * BILLION
    assert memory.master == 0
    assert memory.total == 1120 * BILLION == 16 * 70 * BILLION


def test_d4_states_of_other_optimizers():
    """Adam's in bf16 are half, momentum and Lion keep one number, SGD none."""
    assert state_bytes(70 * BILLION, moment_bytes=2).moments == 280 * BILLION
    assert state_bytes(70 * BILLION, moments=1).moments == 280 * BILLION
    assert state_bytes(70 * BILLION, moments=0).moments == 0


def test_d7_weights_of_a_billion():
    full, half = state_bytes(BILLION), state_bytes(BILLION, weight_bytes=2)
    assert full.weights == 4 * BILLION
    assert half.weights == 2 * BILLION
    assert half.weights + half.master == 6 * BILLION
    assert full.total == half.total == 16 * BILLION
    assert state_bytes(70 * BILLION, weight_bytes=2).weights == 140 * BILLION


def test_d7_source_error_half_precision_does_not_halve_the_state():
    """000, 002 and 003 say 16 bits halve memory: true of what a layer keeps, not of weights with master and moments."""
    full, half = state_bytes(70 * BILLION), state_bytes(70 * BILLION, weight_bytes=2)
    assert half.total == full.total
    assert 2 * (half.weights + half.master) > full.weights + full.master


def test_d8_written_out_scores_are_quadratic():
    assert score_elements(heads=8, context=2048) == 4 * score_elements(heads=8, context=1024)


def test_g2_cache_of_7B():
    """LLaMA-7B in 16 bits: 0.5 MiB a token, 2 GiB at T 4,096; a quarter of the key heads keep a quarter."""
    assert cache_bytes(32, 4096, 1) == 1 << 19
    assert cache_bytes(32, 4096, 4096) == 2 << 30
    assert 4 * cache_bytes(32, 1024, 4096) == cache_bytes(32, 4096, 4096)
