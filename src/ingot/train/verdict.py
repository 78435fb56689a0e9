"""The verdict of a training: whether it learned, in one sentence with the number that decides.

The deciding metric is measured on the same held-out rows before the first step and after the last one. A change counts
if it is larger than `MIN_CHANGE` of the start and than `MIN_ERRORS` standard errors. The error is that of the paired
differences of parts of the rows; samples of both evaluations have the same prompts and random numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Any, Literal, NamedTuple

Verdict = Literal["learned", "nothing learned", "worse", "not measured"]
MIN_CHANGE = 0.005
"""Smallest change that counts, as a fraction of the value at the start."""
MIN_ERRORS = 2.5
"""Smallest change that counts, in its standard errors."""
FEW_UPDATES = 50
"""With fewer updates, their number is the likely reason that nothing was learned."""
PARTS = 8
"""Parts of an evaluation's held-out rows whose losses are compared in pairs. Rewards: those of all prompts."""
METRICS = (
    ("val_reward", "reward", True),
    ("val_loss_nats", "validation loss", False),
    ("train_loss_nats", "training loss", False),
)
"""(field of an evaluation, its label, whether more is better), the deciding one first."""


class Change(NamedTuple):
    """The deciding metric at the first and at the last evaluation."""

    field: str
    label: str
    start: float
    end: float
    more_is_better: bool

    @property
    def gain(self) -> float:
        """The improvement; negative if it got worse."""
        return self.end - self.start if self.more_is_better else self.start - self.end

    def __str__(self) -> str:
        return f"{self.label} {self.start:.4g} → {self.end:.4g}"


@dataclass(frozen=True)
class Training:
    """What the verdict of a training follows from.

    Args:
        evaluations: metrics of all evaluations during training, in order of their steps, with `step`.
        parts: corpus -> losses or rewards of the parts of its held-out rows, at the first and at the last evaluation.
        fractions: corpus -> its fraction of the tokens of the run.
        updates: number of steps.
        batch_rows: rows of a batch.
        epochs: corpus -> number of passes over it.
        best_step: the step whose weights are kept as the best ones.
        rewards: (mean, standard deviation) of the rewards of steps; empty unless the objective samples.
    """

    evaluations: Sequence[Mapping[str, Any]]
    updates: int
    parts: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    fractions: Mapping[str, float] = field(default_factory=dict)
    batch_rows: int = 0
    epochs: Mapping[str, float] = field(default_factory=dict)
    best_step: int = 0
    rewards: Sequence[tuple[float, float]] = ()


def change(evaluations: Iterable[Mapping[str, Any]]) -> Change | None:
    """The change of the deciding metric; None with fewer than two evaluations."""
    measured = list(evaluations)
    for name, label, more_is_better in METRICS:
        values = [e[name] for e in measured if e.get(name) is not None]
        if len(values) > 1:
            return Change(name, label, values[0], values[-1], more_is_better)
    return None


def verdict(training: Training) -> tuple[Verdict, str]:
    """The verdict, and the sentence that gives it with the deciding number and what to do."""
    found = change(training.evaluations)
    if found is None:
        return "not measured", "no held-out rows were scored, so whether it learned was not measured"
    before = f"{found} in {training.updates:,} update{'s' if training.updates != 1 else ''}"
    error = standard_error(training, found)
    least = max(MIN_CHANGE * abs(found.start), MIN_ERRORS * error)
    if not math.isfinite(found.end) or found.gain < -least:
        return "worse", f"{before}: worse than the start; {_why_worse(training, found)}"
    if found.gain <= least:
        if first := training.evaluations[0].get("step", 0):
            return "not measured", f"{before}, after step {first:,} of an earlier run, which says whether it learned"
        return "nothing learned", f"{before}: nothing was learned; {_why_nothing(training)}"
    return "learned", f"{before}: learned{_after_the_best(training, found, least)}"


def standard_error(training: Training, found: Change) -> float:
    """The standard error of the change; 0 if it is not known."""
    total = 0.0
    for corpus, (first, last) in training.parts.items():
        differences = [b - a for a, b in zip(first, last, strict=True)]
        if len(differences) > 1:
            total += training.fractions.get(corpus, 1.0) ** 2 * variance(differences) / len(differences)
    ends = [e["val_reward_se"] for e in training.evaluations if e.get("val_reward_se") is not None]
    if found.field == "val_reward" and ends and not total:  # too few prompts for parts
        return math.hypot(ends[0], ends[-1])
    return math.sqrt(total)


def _why_nothing(training: Training) -> str:
    if training.rewards and all(deviation == 0 for _, deviation in training.rewards):
        return f"every sample of a step got the same reward ({training.rewards[-1][0]:g}): check the reward function"
    if training.updates < FEW_UPDATES:
        return f"{_few(training)}: lower batch, or raise duration"
    return "raise optim.lr or duration, or look at the data: it may hold nothing that the model could learn"


def _few(training: Training) -> str:
    """How few the updates are: "3 epochs of talk are 6 updates at batch 32"."""
    updates = f"{training.updates:,} update{'s' if training.updates != 1 else ''}"
    passes = [f"{n:.2g} epoch{'s' if n != 1 else ''} of {corpus}" for corpus, n in training.epochs.items()]
    if passes and training.batch_rows:
        return f"{' and '.join(passes)} are {updates} at batch {training.batch_rows:,}"
    return f"{updates} are few"


def _why_worse(training: Training, found: Change) -> str:
    learned_by_heart = change({k: v for k, v in e.items() if k == "train_loss_nats"} for e in training.evaluations)
    if found.field == "val_loss_nats" and learned_by_heart and _clearly_lower(learned_by_heart):
        fell = f"the training loss fell to {learned_by_heart.end:.4g}, so it learned its rows by heart"
        return f"{fell}: lower optim.lr or duration, or check the data's labels"
    return "lower optim.lr"


def _clearly_lower(loss: Change) -> bool:
    return math.isfinite(loss.end) and loss.gain > 10 * MIN_CHANGE * abs(loss.start)


def _after_the_best(training: Training, found: Change, least: float) -> str:
    """A remark if training went on after its best evaluation and lost by it."""
    measured = [e for e in training.evaluations if e.get(found.field) is not None]
    best = (max if found.more_is_better else min)(measured, key=lambda e: e[found.field])
    lost = Change(found.field, found.label, best[found.field], found.end, found.more_is_better)
    if lost.gain >= -least:
        return ""
    kept = "those weights are" if best["step"] == training.best_step else f"those of step {training.best_step:,} are"
    return f", but it was {lost.start:.4g} at step {best['step']:,}: {kept} kept as the best ones"


def mean_error(deviation: float, n: int) -> float:
    """The standard error of a mean of n values."""
    return deviation / math.sqrt(n) if n else 0.0


def parts_by_corpus(
    first: Mapping[str, Sequence[float]], last: Mapping[str, Sequence[float]]
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Parts of two evaluations, of the corpora that both scored in the same parts."""
    return {name: (first[name], last[name]) for name in first if len(first[name]) == len(last.get(name, ()))}


def mean_reward(steps: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(mean, standard deviation) of the rewards of logged steps."""
    return [(s["reward"], s["reward_std"]) for s in steps if "reward" in s and "reward_std" in s]
