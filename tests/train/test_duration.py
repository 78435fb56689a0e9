"""How long a run is, in every unit a recipe may use."""

import pytest

from ingot.core.errors import UserError
from ingot.train.duration import Duration


@pytest.mark.parametrize(
    ("text", "unit", "tokens"),
    [
        ("3M tokens", "tokens", 3e6),
        ("2.5K tokens", "tokens", 2500),
        ("1e6 tokens", "tokens", 1e6),
        ("1_000_000 tokens", "tokens", 1e6),
        ("300B tokens", "tokens", 3e11),
        ("2 epochs", "epochs", 20_000),
        ("0.5 epoch", "epochs", 5000),
        ("20 tokens/param", "tokens/param", 4000),
    ],
)
def test_units(text: str, unit: str, tokens: float) -> None:
    duration = Duration.parse(text)
    assert (duration.unit, duration.tokens(epoch=10_000, parameters=200)) == (unit, tokens)


def test_steps_are_a_unit_of_their_own() -> None:
    assert Duration.parse("5000 steps") == Duration(5000, "steps")
    assert Duration.parse("1 step") == Duration(1, "steps")


def test_an_epoch_of_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match="once the texts are encoded"):
        Duration.parse("1 epoch").tokens(None, 200)


@pytest.mark.parametrize(("billions", "tokens"), [(7, 140e9), (10, 200e9), (70, 1.4e12), (400, 8e12)])
def test_F3_source_error_twenty_tokens_per_parameter(billions: int, tokens: float) -> None:
    """002's 10B -> 200B is the rule; 001 tabulates 1.4T for 7B, which is 200 a parameter, and 3T for 400B, 7.5."""
    assert Duration.parse("20 tokens/param").tokens(None, billions * 10**9) == tokens


@pytest.mark.parametrize("text", ["", "fast", "5", "5 parsecs", "-3 steps", "0 steps", "3 M", "1..2 steps"])
def test_anything_else_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="expected "):
        Duration.parse(text)
