"""Metrics of steps and evaluations: loss terms summed over micro-batches, and several updates merged to one step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.train.bit_flips import Check
from ingot.train.objective import Mean, Term


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step, still on the device, so that a step does not wait for them."""

    step: int
    loss: Tensor
    """Mean over the updates of the step."""
    others: dict[str, Any]
    """Penalties and metrics by name."""
    grad_norm: Tensor
    """Before clipping."""
    lr: float
    tokens: int
    """Predicted tokens of the step's updates."""
    tokens_seen: int
    """Predicted tokens of all steps up to this one, for comparing runs of different batch sizes."""
    skipped: Tensor
    """Number of updates that were skipped (`train/guard.py`)."""
    updates: int = 1
    checks: Sequence[Check] = ()
    """For bits that flipped before its updates (`train/bit_flips.py`)."""

    @property
    def lost(self) -> Tensor:
        """Whether no update of the step was applied."""
        return self.skipped == self.updates


class Evaluated(NamedTuple):
    """An evaluation of some rows."""

    loss: float
    counts: dict[str, int]
    """Units of all batches."""
    metrics: dict[str, float]
    parts: list[float]
    """The loss of each batch; the reward of each row if the objective samples."""
    rows: int


class TermSums:
    """The terms of a batch, summed over its micro-batches, each divided by the global count of its unit.

    Args:
        counts: units of the batch, over all micro-batches and ranks.
    """

    def __init__(self, counts: Mapping[str, int]):
        self._counts = counts
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, Term] = {}

    def add(self, terms: dict[str, Term]) -> Tensor:
        """Add the terms of a micro-batch. Returns its contribution to the loss to differentiate."""
        values = normalised(terms, self._counts)
        self._terms |= terms
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        return torch.stack([value for name, value in values.items() if not terms[name].metric]).sum()

    def read(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The reported loss, and penalties and metrics by name."""
        sums = {name: sum_over_ranks(value) for name, value in self._sums.items()}
        loss = torch.stack([sums[name] for name, term in self._terms.items() if reported(term)]).sum()
        return loss, {name: sums[name] for name, term in self._terms.items() if not reported(term)}


def normalised(terms: dict[str, Term], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """The contribution of each term to the loss: weight * sum / count of its unit."""
    return {name: t.weight * t.sum / max(1, counts[t.unit]) for name, t in terms.items()}


def reported(term: Term) -> bool:
    """Whether a term is part of the reported loss."""
    return not (term.penalty or term.metric)


def evaluation_means(
    terms: Mapping[str, Term],
    counts: Mapping[str, int],
    batch_metrics: Sequence[tuple[int, Mapping[str, Any]]],
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> tuple[float, dict[str, float]]:
    """The loss of an evaluation, and its metrics by name.

    Args:
        terms: summed over all batches.
        counts: units of all batches.
        batch_metrics: (rows, `Context.metrics`) of each batch.
    """
    values = {n: float(sum_over_ranks(t.sum) * t.weight / max(1, counts[t.unit])) for n, t in terms.items()}
    loss = sum(value for name, value in values.items() if reported(terms[name]))
    totals: dict[str, float] = {}
    scored_rows: dict[str, int] = {}  # of a `Mean`
    for n, metrics in batch_metrics:
        for name, metric in metrics.items():
            value, weight = (metric.value, metric.rows) if isinstance(metric, Mean) else (float(metric), n)
            totals[name] = totals.get(name, 0.0) + value * weight
            scored_rows[name] = scored_rows.get(name, 0) + (weight if isinstance(metric, Mean) else 0)
    all_rows = sum(n for n, _ in batch_metrics)
    term_metrics = {name: value for name, value in values.items() if terms[name].metric}
    return loss, term_metrics | {name: total / (scored_rows[name] or all_rows) for name, total in totals.items()}


def merge_updates(updates: Sequence[StepMetrics], metrics: Mapping[str, Any]) -> StepMetrics:
    """The metrics of a step from those of its updates.

    Losses and other metrics are averaged over the updates that have them, the gradient norm is the largest, tokens are
    summed. Skipped updates do not count, unless all are.

    Args:
        metrics: `Context.metrics` of the step.
    """
    last = updates[-1]
    metrics = {name: metric.value if isinstance(metric, Mean) else metric for name, metric in metrics.items()}
    if len(updates) == 1:
        return replace(last, others={**last.others, **metrics})
    skipped = torch.stack([u.skipped for u in updates]).sum()
    counted = [(u, ~u.lost | (skipped == len(updates))) for u in updates]
    names = dict.fromkeys(name for u in updates for name in u.others)
    others = {name: _mean([(u.others[name], counts) for u, counts in counted if name in u.others]) for name in names}
    norms = [torch.where(counts, u.grad_norm, -math.inf) for u, counts in counted]
    tokens = sum(u.tokens for u in updates)
    return replace(
        last,
        loss=_mean([(u.loss, counts) for u, counts in counted]),
        others={**others, **metrics},
        grad_norm=torch.stack(norms).max(),
        tokens=tokens,
        tokens_seen=last.tokens_seen - last.tokens + tokens,
        skipped=skipped,
        updates=len(updates),
    )


def _mean(values: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of the values whose second part is true; NaN if there is none."""
    total = torch.stack([torch.where(counts, value, 0) for value, counts in values]).sum()
    return total / torch.stack([counts for _, counts in values]).sum()
