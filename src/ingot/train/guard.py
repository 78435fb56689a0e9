"""Keeps damage out of weights and moments: which updates are skipped, and when a run goes back to a checkpoint.

An update whose loss or gradient is not finite is skipped: weights, moments and averages stay as they were. So is a
spike, where the reported loss is a negative log-likelihood: a loss above `FACTOR` times, and `NATS` above, the largest
of `WINDOW` accepted losses. The newest `DELAY` accepted ones are no part of these, so that a loss that climbs step by
step does not hide itself. Both are decided on the device, so that a GPU is not waited for, and both follow from the
steps alone, so that a resumed run decides alike.

The measure is the largest loss and no z-score of median and deviation: the loss of a small batch has two modes where
the mixture has two kinds of rows, and healthy runs reach z = 22. In 138,000 windows of 65 healthy runs no loss was 0.4
nats above the largest, and none 1.1 times and 0.13 nats. The gradient norm is no criterion: healthy ones reach 155
deviations, and clipping bounds their effect (`docs/LOG.md`).

A trouble begins with a skipped step and ends after `CALM` accepted ones. If it does not end, the weights are to blame:
the run goes back to a checkpoint from before it and leaves its steps out. `bit_flips.py` notices another trouble, for
which no rows are to blame.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

WINDOW, DELAY = 64, 16
"""Accepted losses whose largest counts, and newer ones that do not count yet."""
FACTOR, NATS = 1.25, 0.5
CALM = 20
"""Accepted steps in a row after which a trouble is over."""
MAX_NOT_FINITE = 20
"""Steps of a trouble that are skipped as not finite, at most: more than the 16 halvings that take the first loss scale
of fp16 to 1."""
MAX_SKIPPED = 60
"""Skipped steps of a trouble, at most. Bad rows end by themselves; 60 batches of them are less likely than bad weights,
which do not."""
MAX_ROLLBACKS = 5
"""Times that a run goes back before it ends."""
INITIAL: Mapping[str, Any] = {"first": 0, "accepted": 0, "skipped": 0, "not_finite": 0, "left_out": []}
"""The state before the first step: first skipped step of a trouble, or 0; accepted steps since its last skipped one;
its skipped steps, and those not finite; first and last step of each stretch that is left out."""


class Guard:
    """Decides which updates are skipped.

    Args:
        active: whether any is.
        spikes: whether losses are compared with earlier ones; else only what is not finite is skipped.
    """

    def __init__(self, active: bool, spikes: bool, device: str):
        self.active, self.spikes = active, active and spikes
        self._losses = torch.full((WINDOW + DELAY,), math.inf, dtype=torch.float64, device=device)

    def rejects(self, loss: Tensor, norm: Tensor, sampled: bool = False) -> Tensor:
        """Whether the next update must not be applied: a boolean scalar on the device.

        Args:
            sampled: whether the model wrote the rows, whose loss says nothing about that of data.
        """
        if not self.active:
            return torch.zeros((), dtype=torch.bool, device=loss.device)
        rejected = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if self.spikes and not sampled:
            largest = self._losses[:WINDOW].max()  # infinite until there are enough
            rejected = rejected | (loss > torch.maximum(FACTOR * largest, largest + NATS))
            newer = torch.cat([self._losses[1:], loss.double().reshape(1)])
            self._losses.copy_(torch.where(rejected, self._losses, newer))
        return rejected

    def forget(self) -> None:
        """Forget the losses so far, as at the start of a phase, whose rows may have others."""
        self._losses.fill_(math.inf)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores, by name."""
        return {"guard.losses": self._losses} if self.spikes else {}


class Rollback(NamedTuple):
    """Why the run has to go back to a checkpoint."""

    step: int
    """The step that showed it."""
    first: int
    """The first step that may be damaged."""
    why: str
    leave_out: bool = True
    """Whether the rows of these steps may be to blame; without, the steps are computed again."""
    reloads: bool = True
    """Whether checkpoints have what is damaged."""


def record(state: Mapping[str, Any], step: int, skipped: bool, finite: bool) -> dict[str, Any]:
    """The state after another step."""
    if not skipped and (not state["first"] or state["accepted"] + 1 == CALM):
        return {**INITIAL, "left_out": state["left_out"]}
    return {
        "first": state["first"] or step,
        "accepted": 0 if skipped else state["accepted"] + 1,
        "skipped": state["skipped"] + skipped,
        "not_finite": state["not_finite"] + (skipped and not finite),
        "left_out": state["left_out"],
    }


def endless(state: Mapping[str, Any], steps: int) -> bool:
    """Whether the trouble does not end by itself.

    Args:
        steps: steps of the plan; a run that skips all of them has no result.
    """
    return state["not_finite"] >= min(MAX_NOT_FINITE, steps) or state["skipped"] >= MAX_SKIPPED


def begin(state: Mapping[str, Any], step: int) -> int:
    """The first step that a trouble may have damaged unnoticed; without one, what one that begins after `step` may."""
    return max(1, (state["first"] or step + 1) - DELAY)


def is_left_out(state: Mapping[str, Any], step: int) -> bool:
    """Whether a step has no update, because the run went back."""
    return any(first <= step <= last for first, last in state["left_out"])


def reason(loss: float, norm: float, precision: str) -> str:
    """Why a step was skipped."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if math.isfinite(norm):
        return f"the loss is far above the largest of {WINDOW} steps before"
    return "gradient overflow in fp16" if precision == "fp16" else "the gradient is not finite"
