"""How long a run is, in every unit a recipe may use."""

import pytest

from ingot.train.duration import Duration


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("5000 steps", 5000),
        ("1 step", 1),
        ("3M tokens", 3000),
        ("2.5K tokens", 3),
        ("1e6 tokens", 1000),
        ("1_000_000 tokens", 1000),
        ("2 epochs", 20),
        ("0.5 epoch", 5),
        ("20 tokens/param", 4),
    ],
)
def test_units(text: str, steps: int) -> None:
    assert Duration.parse(text).steps(batch_tokens=1000, epoch_tokens=10_000, parameters=200) == steps


@pytest.mark.parametrize("text", ["", "fast", "5", "5 parsecs", "-3 steps", "0 steps", "3 M", "1..2 steps"])
def test_anything_else_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="expected "):
        Duration.parse(text)
