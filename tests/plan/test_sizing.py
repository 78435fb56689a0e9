"""The model for a time: the best of a grid under the law, worth of repeated text, speeds between measurements."""

import math

import pytest

from ingot.model.config import ModelSettings
from ingot.plan.flops import training_flops_per_token
from ingot.plan.scaling import LAWS, effective_parameters, effective_tokens
from ingot.plan.sizing import MAX_EPOCHS, Candidate, choose, shortest

LAW = LAWS["besiroglu"]


def _candidates(speed: float, vocab: int = 2048) -> list[Candidate]:
    """Depths 1 to 16 at `speed` FLOP/s, 20 s of a run beside training."""
    configs = {d: ModelSettings(depth=d).resolve(vocab) for d in range(1, 17)}
    return [Candidate(d, c.parameters, training_flops_per_token(c) / speed, 20, 1e5) for d, c in configs.items()]


@pytest.mark.parametrize("seconds", [180, 3600, 8 * 3600])
@pytest.mark.parametrize("unique", [4e5, 1e7, 1e12])
def test_no_depth_and_no_shorter_training_is_better(seconds: float, unique: float) -> None:
    candidates = _candidates(1e11)
    found = choose(LAW, candidates, seconds, unique)
    assert found
    grid = [
        LAW.loss(
            effective_parameters(c.parameters, unique),
            effective_tokens(min(MAX_EPOCHS * unique, fraction * (seconds - 20) / c.token_seconds), unique),
        )
        for c in candidates
        for fraction in (0.25, 0.5, 0.75, 1.0)
    ]
    assert found.loss <= min(grid) * (1 + 1e-3)
    spent = found.candidate.other_seconds + found.tokens * found.candidate.token_seconds
    assert spent == pytest.approx(seconds) or found.tokens == MAX_EPOCHS * unique


def test_more_time_gives_a_larger_model_and_no_text_is_read_without_end() -> None:
    depths = [
        c.candidate.depth for s in (180, 3600, 80_000) if (c := choose(LAW, _candidates(1e11), s, math.inf)) is not None
    ]
    assert depths == sorted(set(depths))
    little = choose(LAW, _candidates(1e11), 80_000, 4e5)
    assert little
    assert little.candidate.depth < depths[-1], "a text that a large model would learn by heart gets a smaller one"
    tiny = choose(LAW, _candidates(1e11), 80_000, 1e4)
    assert tiny
    assert tiny.tokens == MAX_EPOCHS * 1e4


def test_a_time_without_enough_updates_has_no_choice() -> None:
    candidates = _candidates(1e9)
    least = min(map(shortest, candidates))
    assert choose(LAW, candidates, least * 0.99, 1e9) is None
    assert choose(LAW, candidates, least * 1.01, 1e9)
