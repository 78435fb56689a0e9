"""Time, disk and price of a training run, from measured seconds. No torch."""

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Measured seconds of what a train stage does on a machine."""

    step_s: float
    """A step, from its batch to the updated weights."""
    token_s: float
    """An evaluated token."""
    sample_s: float
    """The text that is sampled at an evaluation."""
    byte_s: float
    """A byte of a checkpoint, for as long as training waits."""
    start_s: float
    """From the start of the process to the first step, with what the first step compiles."""


@dataclass(frozen=True)
class Work:
    """What a train stage does."""

    steps: float
    """Steps of the size that was measured."""
    evaluations: int
    """Evaluations during training, each with a sample."""
    evaluation_tokens: int
    """Tokens of one of them."""
    final_tokens: int
    """Tokens of the evaluation after the end."""
    saves: int
    checkpoint_bytes: int
    """Bytes of a checkpoint."""
    best_bytes: int
    """Bytes of the best weights, which are written after each evaluation that is better than the ones before."""


def stage_seconds(speed: Speed, work: Work) -> dict[str, float]:
    """Seconds of a stage by what they are spent on. Each evaluation is expected to be the best so far."""
    evaluation_s = work.evaluation_tokens * speed.token_s + speed.sample_s
    saved_bytes = work.saves * work.checkpoint_bytes + work.evaluations * work.best_bytes
    return {
        "start": speed.start_s,
        "steps": work.steps * speed.step_s,
        "evaluations": work.evaluations * evaluation_s + work.final_tokens * speed.token_s,
        "checkpoints": saved_bytes * speed.byte_s,
    }


def evaluation_count(steps: int, every: int) -> int:
    """Evaluations during training: before the first step, after every `every`-th but the last, and after the last."""
    return (steps - 1) // every + 2


def save_count(steps: int, step_s: float, every: Collection[int], first_s: float, longest_s: float) -> int:
    """Checkpoints of a run: after multiples of the steps in `every`, after intervals that double from `first_s` to
    `longest_s`, and at the end.

    Args:
        steps: all steps.
        step_s: seconds of a step.
        every: `loop.save_every`, and `loop.keep_every` if it is set.
        first_s: seconds until the first checkpoint.
        longest_s: `loop.save_minutes` in seconds.
    """
    step = saves = 0
    interval_s = first_s
    while step < steps:
        late = step + math.floor(min(interval_s, longest_s) / step_s) + 2  # noticed before a step, saved after it
        step = min(*(step - step % n + n for n in every), late, steps)
        saves += 1
        interval_s *= 2
    return saves


def update_seconds(one_s: float, two_s: float, micro_batches: float) -> float:
    """Seconds of a step of some micro-batches, from those of steps of one and of two.

    Args:
        one_s, two_s: seconds of steps of one and of two micro-batches, update included.
        micro_batches: of the step; a smaller last one is a fraction.
    """
    micro_s = max(0.0, two_s - one_s)
    return one_s + (micro_batches - 1) * micro_s


def price(seconds: float, ranks: int, per_hour: float) -> float:
    """Price of a run: each of `ranks` devices costs `per_hour` for as long as the run takes."""
    return seconds / 3600 * ranks * per_hour
