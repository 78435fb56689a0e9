"""The model and the length of training for a time: of several depths the one with the lowest loss by a scaling law."""

from collections.abc import Iterable
from dataclasses import dataclass

from ingot.plan.scaling import ScalingLaw, effective_parameters, effective_tokens

MAX_EPOCHS = 40
"""Passes over a text, at most: by then another one is worth a twelfth of the first."""


@dataclass(frozen=True)
class Candidate:
    """A model that might be trained."""

    depth: int
    parameters: int
    token_seconds: float
    """Seconds of a trained token."""
    other_seconds: float
    """Seconds of the run beside training: corpus, tokenizer, starts of processes, evaluations."""
    min_tokens: float = 0.0
    """Tokens of the fewest updates that make a training."""


@dataclass(frozen=True)
class Choice:
    """The model that a time is spent on."""

    candidate: Candidate
    tokens: float
    """Trained tokens."""
    effective_tokens: float
    """Tokens of new text that they are worth."""
    loss: float
    """By the law, which was fitted to another text: only differences between candidates mean something."""


def choose(law: ScalingLaw, candidates: Iterable[Candidate], seconds: float, unique: float) -> Choice | None:
    """The candidate with the lowest loss after all the time is used; None if none has time for its fewest updates.

    Args:
        law: the loss by parameters and tokens.
        candidates: the models.
        seconds: of the complete run.
        unique: tokens of the text. Later passes count less, and so do parameters that it is too short for.
    """
    choices = []
    for one in candidates:
        tokens = min((seconds - one.other_seconds) / one.token_seconds, MAX_EPOCHS * unique)
        if tokens > 0 and tokens >= min(one.min_tokens, MAX_EPOCHS * unique):
            worth = effective_tokens(tokens, unique)
            loss = law.loss(effective_parameters(one.parameters, unique), worth)
            choices.append(Choice(one, tokens, worth, loss))
    return min(choices, key=lambda choice: choice.loss, default=None)


def shortest(candidate: Candidate) -> float:
    """Seconds of the shortest run of a candidate."""
    return candidate.other_seconds + candidate.min_tokens * candidate.token_seconds
