"""A step's numbers: what its terms add to the loss, and one row of them where an objective makes several updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ingot.train.objective import Mean, Term


@dataclass(frozen=True)
class StepMetrics:
    """One step's numbers, still on the device, so that a step never waits for one."""

    step: int
    loss: Tensor
    """The mean of the step's updates, where an objective makes several of one batch."""
    others: dict[str, Any]
    """By name: penalties, metrics and the objective's notes."""
    grad_norm: Tensor
    """Before clipping."""
    lr: float
    tokens: int
    """Targets that its updates were made from."""
    tokens_seen: int
    """Of all steps up to this one: the axis on which curves of unequal batches are compared."""
    skipped: bool = False
    """The gradient overflowed at its loss scale, so no weight moved."""


class TermSums:
    """The terms of a batch, added up over its micro-batches, each divided by its unit's global count.

    Args:
        counts: units of the whole step, over all micro-batches and ranks.
    """

    def __init__(self, counts: Mapping[str, int]):
        self._counts = counts
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, Term] = {}

    def add(self, terms: dict[str, Term]) -> Tensor:
        """Add a micro-batch; returns its part of the loss that is trained on."""
        parts = normalised(terms, self._counts)
        self._terms |= terms
        for name, part in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + part.detach().double()
        return torch.stack([part for name, part in parts.items() if not terms[name].metric]).sum()

    def read(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The reported loss, and penalties and metrics by name."""
        sums = {name: sum_over_ranks(value) for name, value in self._sums.items()}
        loss = torch.stack([sums[name] for name, term in self._terms.items() if reported(term)]).sum()
        return loss, {name: sums[name] for name, term in self._terms.items() if not reported(term)}


def normalised(terms: dict[str, Term], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """What each term adds to the loss of a step with these global counts: weight * sum / count."""
    return {name: t.weight * t.sum / max(1, counts[t.unit]) for name, t in terms.items()}


def reported(term: Term) -> bool:
    """Whether a term is part of the loss that a run is known by."""
    return not (term.penalty or term.metric)


def evaluation_means(
    terms: Mapping[str, Term],
    counts: Mapping[str, int],
    notes: Sequence[tuple[int, Mapping[str, Any]]],
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> tuple[float, dict[str, float]]:
    """The loss of an evaluation, and its metrics and notes by name.

    Args:
        terms: summed over all batches.
        notes: (rows, notes) of each batch.
    """
    parts = {n: float(sum_over_ranks(t.sum) * t.weight / max(1, counts[t.unit])) for n, t in terms.items()}
    loss = sum(part for name, part in parts.items() if reported(terms[name]))
    totals: dict[str, float] = {}
    rows: dict[str, int] = {}
    for n, noted in notes:
        for name, note in noted.items():
            value, weight = note if isinstance(note, Mean) else (float(note), n)
            totals[name] = totals.get(name, 0.0) + value * weight
            rows[name] = rows.get(name, 0) + (weight if isinstance(note, Mean) else 0)
    every = sum(n for n, _ in notes)
    metrics = {name: part for name, part in parts.items() if terms[name].metric}
    return loss, metrics | {name: total / (rows[name] or every) for name, total in totals.items()}


def merge_updates(updates: Sequence[StepMetrics], notes: Mapping[str, Any]) -> StepMetrics:
    """One step's numbers from its updates': means of those that have a number, the largest gradient that was applied,
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
