"""Effects of later training on earlier tasks, from the matrix R[i, j]: the score on task j after stage i of a chain.

A higher score is better (losses count negative). After the last stage of a chain:

    forgetting of j       max over earlier i of R[i, j] - R[last, j]                (Chaudhry et al. 2018, arXiv:1801.10112)
    backward transfer     mean over old j of R[last, j] - R[j, j]                   (Lopez-Paz and Ranzato 2017,
    forward transfer      mean over later j of R[j - 1, j] - b_j                      arXiv:1706.08840, eqs. 2 to 4)

A task belongs to the stage that first trains on it; R[j, j] is the score after that stage, and b_j the score of a
uniform guess. Intervals resample the held-out documents (or items), the same ones for both scores of a difference, so
differences in difficulty between documents cancel. Each task is resampled separately.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ingot.evaluate.bootstrap import interval, resample

OLD, LATER = "old tasks", "later tasks"
"""The `task` of table rows that are means over tasks."""


@dataclass(frozen=True)
class Scores:
    """One model on one task, per document or item; its score is sign * sum(total) / sum(count)."""

    total: np.ndarray
    count: np.ndarray
    unit: str
    """Suffix of metric names: `_nats` for a loss, empty for an accuracy."""
    chance: float | None = None
    """The score of a uniform guess."""

    @property
    def sign(self) -> int:
        return -1 if self.unit == "_nats" else 1

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        return self.sign * self.total, self.count


@dataclass(frozen=True)
class ChainStage:
    """One stage of a chain: its name, and the tasks that it was the first to train on."""

    name: str
    learned: tuple[str, ...]


def summary(chain: Sequence[ChainStage], scores: Mapping[tuple[str, str], Scores]) -> Iterator[dict[str, Any]]:
    """Table rows {model, task, metric, value, low, high, n} about the last stage of a chain.

    Args:
        chain: at least two stages, each initialised from the one before.
        scores: (stage, task) -> scores; tasks that were not scored for every stage are left out.
    """
    last = chain[-1].name
    tasks = [task for name, task in scores if name == last and all((stage.name, task) in scores for stage in chain)]
    for task in tasks:
        if task not in chain[-1].learned:
            earlier = [(stage.name, task) for stage in chain[:-1]]
            best = max(earlier, key=lambda key: resample([scores[key].pair], draws=0)[0])
            yield _row(last, task, "forgetting", scores[best].unit, [(scores[best], scores[last, task])])
    old = [(stage.name, task) for stage in chain[:-1] for task in stage.learned if task in tasks]
    if old:
        pairs = [(scores[last, task], scores[name, task]) for name, task in old]
        yield _row(last, OLD, "backward_transfer", pairs[0][0].unit, pairs)
    later = [
        (before.name, task)
        for before, stage in pairwise(chain)
        for task in stage.learned
        if task in tasks and scores[before.name, task].chance is not None
    ]
    if later:
        against_chance = [(scores[key], None) for key in later]
        yield _row(last, LATER, "forward_transfer", against_chance[0][0].unit, against_chance)


def _row(
    model: str, task: str, metric: str, unit: str, differences: Sequence[tuple[Scores, Scores | None]]
) -> dict[str, Any]:
    """The mean over tasks of a difference of scores, with its interval.

    Args:
        differences: (minuend, subtrahend) of each task; a subtrahend of None stands for the chance score.
    """
    values, draws = [], []
    for seed, (scores, other) in enumerate(differences):
        value, value_draws = resample([scores.pair] if other is None else [scores.pair, other.pair], seed)
        chance = (scores.chance or 0.0) if other is None else 0.0
        values.append(value - chance)
        draws.append(value_draws - chance)
    n = sum(int((scores.count > 0).sum()) for scores, _ in differences)
    return {
        "model": model,
        "task": task,
        "metric": metric + unit,
        **interval(float(np.mean(values)), np.mean(draws, axis=0), n),
    }
