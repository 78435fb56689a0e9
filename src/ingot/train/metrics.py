"""A step's numbers: what its terms add to the loss, and one row of them where an objective makes several updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ingot.train.objective import Mean, Term


@dataclass(frozen=True)
class StepMetrics:
    """One step's numbers, still on the device so that a step never waits for one."""

    step: int
    loss: Tensor
    """Mean of the step's updates, where an objective makes several of one batch."""
    others: dict[str, Any]
    """By name: penalties, metrics and the objective's notes."""
    grad_norm: Tensor
    lr: float
    tokens: int
    """Targets that its updates were made from."""
    tokens_seen: int
    """Of all steps up to this one: what curves of unequal batches are compared over."""
    skipped: bool = False
    """The gradient overflowed at its loss scale, so no weight moved."""


def normalised(terms: dict[str, Term], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """What each term adds to the loss of a step with these global counts: weight * sum / count."""
    return {name: t.weight * t.sum / max(1, counts[t.unit]) for name, t in terms.items()}


def reported(term: Term) -> bool:
    """Whether a term is part of the loss that a run is known by."""
    return not (term.penalty or term.metric)


def merged(updates: Sequence[StepMetrics], notes: Mapping[str, Any]) -> StepMetrics:
    """One step's numbers from its updates': means of those that give a number, the largest gradient that was applied,
    all tokens."""
    last = updates[-1]
    notes = {name: note.value if isinstance(note, Mean) else note for name, note in notes.items()}
    if len(updates) == 1:
        return replace(last, others={**last.others, **notes})
    names = dict.fromkeys(name for u in updates for name in u.others)
    others = {name: torch.stack([u.others[name] for u in updates if name in u.others]).mean() for name in names}
    tokens, applied = sum(u.tokens for u in updates), [u for u in updates if not u.skipped]
    return replace(
        last,
        loss=torch.stack([u.loss for u in updates]).mean(),
        others={**others, **notes},
        grad_norm=torch.stack([u.grad_norm for u in applied or updates]).max(),
        tokens=tokens,
        tokens_seen=last.tokens_seen - last.tokens + tokens,
        skipped=not applied,
    )
