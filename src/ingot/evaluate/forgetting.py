"""What later training did to what was learned before: the matrix R[i, j], score on task j after stage i, summed up.

With the score higher the better (a loss counts negative), after the last stage of a chain:

    forgetting of j       max over earlier i of R[i, j] - R[last, j]                (Chaudhry et al. 2018, arXiv:1801.10112)
    backward transfer     mean over old j of R[last, j] - R[j, j]                   (Lopez-Paz and Ranzato 2017,
    forward transfer      mean over later j of R[j - 1, j] - b_j                      arXiv:1706.08840, eqs. 2 to 4)

A task belongs to the stage that first trains on it, R[j, j] is the score right after that, and b_j is what a uniform
guess scores. Intervals resample documents (or items) of the held-out part, the same ones before and after, so that what
is hard about a document cancels; of several tasks each is resampled by itself.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ingot.evaluate.bootstrap import interval, resampled

OLD, LATER = "old tasks", "later tasks"
"""What the rows of a mean over tasks have for a task."""


@dataclass(frozen=True)
class Scores:
    """One model on one task: a score is sign * total / count, both summed over documents or items."""

    total: np.ndarray
    count: np.ndarray
    unit: str
    """Ends the names of metrics: `_nats`, or nothing for a share."""
    guess: float | None = None
    """The score of a uniform guess."""

    @property
    def sign(self) -> int:
        return -1 if self.unit == "_nats" else 1

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        return self.sign * self.total, self.count


@dataclass(frozen=True)
class Link:
    """One stage of a chain: its name, and the tasks that it was the first to train on."""

    name: str
    learned: tuple[str, ...]


def summary(chain: Sequence[Link], scores: Mapping[tuple[str, str], Scores]) -> Iterator[dict[str, Any]]:
    """Rows of a table {model, task, metric, value, low, high, n} about the last stage of a chain.

    Args:
        chain: stages, each started from the one before; two at least.
        scores: (stage, task) -> scores; tasks that were not scored for every stage are left out.
    """
    last = chain[-1].name
    tasks = [task for name, task in scores if name == last and all((link.name, task) in scores for link in chain)]
    for task in tasks:
        if task not in chain[-1].learned:
            of = [(link.name, task) for link in chain[:-1]]
            best = max(of, key=lambda key: resampled([scores[key].pair], draws=0)[0])
            yield _row(last, task, "forgetting", scores[best].unit, [(scores[best], scores[last, task])])
    old = [(link.name, task) for link in chain[:-1] for task in link.learned if task in tasks]
    if old:
        pairs = [(scores[last, task], scores[name, task]) for name, task in old]
        yield _row(last, OLD, "backward_transfer", pairs[0][0].unit, pairs)
    later = [
        (before.name, task)
        for before, link in pairwise(chain)
        for task in link.learned
        if task in tasks and scores[before.name, task].guess is not None
    ]
    if later:
        alone = [(scores[key], None) for key in later]
        yield _row(last, LATER, "forward_transfer", alone[0][0].unit, alone)


def _row(
    model: str, task: str, metric: str, unit: str, differences: Sequence[tuple[Scores, Scores | None]]
) -> dict[str, Any]:
    """The mean over tasks of a score less another (or less a guess), with its interval."""
    values, draws = [], []
    for seed, (scores, less) in enumerate(differences):
        value, drawn = resampled([scores.pair] if less is None else [scores.pair, less.pair], seed)
        base = (scores.guess or 0.0) if less is None else 0.0
        values.append(value - base)
        draws.append(drawn - base)
    n = sum(len(scores.total) for scores, _ in differences)
    found = interval(float(np.mean(values)), np.mean(draws, axis=0), n)
    return {"model": model, "task": task, "metric": metric + unit, **found}
