"""The schedule of a train stage as a pure function of the step: phase, rows and learning rate.

A stage is a list of phases (usually one). A phase has a mixture, a context, a batch size (or a ramp) and a length. The
recipe and the sizes of the stores determine for any step, without iterating over earlier ones: the rows of its batch,
the number of tokens trained on, and the learning rate. So nothing of it is saved in checkpoints, and `ingot trace` can
show past and future steps.

- Within a phase, sources are mixed by error diffusion: the fractions hold in any window of rows.
- A source continues where the previous phase stopped: no row is repeated before all were seen. A source has different
  rows for each context, so its position is counted per context, and apart for rows in the stored order.
- Steps beyond the last phase continue it: its batch size, its mixture and the end of its curve.

`stages/training/phases.py` builds a timeline. No torch, because `ingot plan` and `ingot trace` use it.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.data.batch_size import BatchSizes
from ingot.data.sampler import Order
from ingot.optim.schedule import Schedule

MAX_OVERSHOOT = 1.5
"""A phase that trains on more than this multiple of the tokens that its duration asks for is reported."""


class SourceSize(Protocol):
    """Size of a source in rows of one context: a row plan of `data/packing.py`, or an `AssumedSize`.

    `rows`: number of rows. `targets`: targets of all rows, None if unknown. `row_targets`: mean targets of a row.
    """

    @property
    def rows(self) -> int: ...
    @property
    def targets(self) -> int | None: ...
    @property
    def row_targets(self) -> float: ...


@dataclass(frozen=True)
class AssumedSize:
    """A source that is not encoded yet: every row is assumed to be full, and the number of rows is unknown."""

    row_targets: float
    targets: int | None = None
    rows: int = 1


SourceSizes = Callable[[str, int], SourceSize]
"""(source, context) -> its size."""


def assumed_size(source: str, context: int) -> SourceSize:
    """The `SourceSizes` of sources that are not encoded yet. Durations in epochs are then unknown."""
    return AssumedSize(float(context))


@dataclass(frozen=True)
class Curve:
    """A learning-rate schedule that begins after step `origin`."""

    schedule: Schedule
    origin: int

    def lr(self, step: int) -> float:
        return self.schedule.lr(step - self.origin)


@dataclass(frozen=True)
class Phase:
    """A run of steps with one mixture and one context."""

    name: str
    first: int
    """Its first step."""
    steps: int
    context: int
    sizes: BatchSizes
    """Rows of each step, with steps counted from 1 within the phase."""
    fractions: tuple[float, ...]
    """Fraction of the tokens from each source, in the order of `Timeline.sources`; 0 for sources of other phases."""
    wanted: tuple[float, ...]
    """The fractions without `max_epochs`."""
    row_targets: float
    """Mean targets of a row."""
    requested_tokens: float
    """Targets that its duration asks for. A step is never cut, so a short phase may train on more."""
    tokens_before: float
    """Targets of all earlier phases."""
    order: Order
    """The rows of the phase in the order of training."""

    def rows_after(self, step: int) -> int:
        """Rows of the phase up to and including a step of the run."""
        return self.sizes.rows_before(step - self.first + 2)

    @property
    def last(self) -> int:
        """Its last step."""
        return self.first + self.steps - 1

    @property
    def rows(self) -> int:
        """Rows of all its steps."""
        return self.rows_after(self.last)

    @property
    def tokens(self) -> float:
        """Targets of all its steps."""
        return self.rows * self.row_targets


def overshoot(phase: Mapping[str, Any], epochs: Mapping[str, float] | None) -> str:
    """A sentence about a phase that trains on much more than its duration asks for, because a step is never cut.

    Args:
        phase: a row of `Timeline.summary`.
        epochs: corpus -> epochs of the complete run; None if unknown.

    Returns:
        The sentence; "" for other phases.
    """
    tokens, requested = phase["tokens"], phase.get("requested_tokens", phase["tokens"])
    if tokens <= MAX_OVERSHOOT * requested:
        return ""
    times = f"{tokens / requested:.3g} times the {requested:,} tokens" if requested else f"{tokens:,} tokens, not the 0"
    used = "".join(f", {epochs[name]:.3g} epochs of {name}" for name in phase["data"]) if epochs else ""
    name = "" if phase["name"] == "all" else f"phase {phase['name']} "
    return (
        f"{name}trains on {times} that its duration asks for{used}, because a step is never cut and has "
        f"{phase['last_rows']:,} rows; lower batch"
    )


@dataclass(frozen=True)
class Timeline:
    """All steps of a train stage. Steps are 1-based; steps beyond the last one continue the last phase."""

    sources: tuple[str, ...]
    """All corpora of all phases, by name. The source of a row is an index into this tuple."""
    phases: tuple[Phase, ...]
    curves: tuple[Curve, ...]
    """The learning-rate curve of each phase."""

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return self.phases[-1].last

    @property
    def context(self) -> int:
        """Tokens of the longest rows."""
        return max(phase.context for phase in self.phases)

    @property
    def peak(self) -> float:
        """The highest peak of the learning-rate curves."""
        return max(c.schedule.peak for c in self.curves)

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return max(p.sizes.rows(p.steps) for p in self.phases)

    @property
    def largest(self) -> tuple[int, int]:
        """Tokens of the longest rows and rows of the largest step, which the micro-batch follows from."""
        return self.context, self.max_rows

    @property
    def fractions(self) -> list[float]:
        """Fraction of each source in the tokens of all phases."""
        total = self.tokens(self.steps)
        return [sum(p.tokens * p.fractions[s] for p in self.phases) / total for s in range(len(self.sources))]

    def phase(self, step: int) -> Phase:
        """The phase of a step."""
        return self.phases[self._phase_index(step)]

    def rows(self, step: int) -> int:
        """Rows in the batch of a step."""
        phase = self.phase(step)
        return phase.sizes.rows(step - phase.first + 1)

    def pass_rows(self, phase: Phase, micro_batch: int, rows: int) -> int:
        """Rows of a forward pass: `micro_batch` of the longest rows, more of shorter ones; at most `rows`."""
        return min(rows, micro_batch * (self.context // phase.context))

    def at(self, step: int) -> tuple[Phase, np.ndarray, np.ndarray]:
        """Phase, sources and row numbers of a step (both int64, shape (rows,)), for rows of the phase's context."""
        phase = self.phase(step)
        phase_step = step - phase.first + 1
        return phase, *phase.order.at(phase.sizes.rows_before(phase_step), phase.sizes.rows(phase_step))

    def steps_of(self, source: int, context: int, row: int) -> list[int]:
        """The steps whose batch contains a row of a source, in order: the inverse of `at`."""
        phases = (p for p in self.phases if p.context == context and p.fractions[source])
        return [
            phase.first - 1 + phase.sizes.step_of(position)
            for phase in phases
            for position in phase.order.positions(source, row, phase.rows)
        ]

    def tokens(self, step: int) -> float:
        """Targets trained on up to and including a step. Counts masked targets too; exact where no row is padded."""
        phase = self.phase(step)
        return phase.tokens_before + phase.rows_after(step) * phase.row_targets

    def work(self, step: int) -> float:
        """Rows x context up to and including a step, which is what training time is proportional to."""
        phases = (p for p in self.phases if p.first <= step)
        return float(sum(p.rows_after(min(step, p.last)) * p.context for p in phases))

    def lr(self, step: int) -> float:
        """Learning rate of a step."""
        return self.curves[self._phase_index(step)].lr(step)

    def unfinished_warmups(self) -> list[int]:
        """Length of each warmup that is longer than the phases of its curve."""
        last = {curve: phase.last for curve, phase in zip(self.curves, self.phases, strict=True)}
        return [curve.schedule.warmup for curve, step in last.items() if curve.schedule.warmup > step - curve.origin]

    def epochs(self, sizes: SourceSizes) -> dict[str, float]:
        """How often the run uses each source, by its targets.

        Args:
            sizes: known sizes of the sources.
        """
        out = dict.fromkeys(self.sources, 0.0)
        for phase in self.phases:
            drawn = phase.order.drawn_after(phase.rows)
            for s, name in enumerate(self.sources):
                if phase.fractions[s]:
                    size = sizes(name, phase.context)
                    assert size.targets, "an assumed size has no epochs"
                    out[name] += (drawn[s] - phase.order.drawn[s]) * size.row_targets / size.targets
        return out

    def summary(self) -> list[dict[str, Any]]:
        """The phases as rows for logs and tables: steps, rows, tokens, learning rate at both ends, mixture."""
        return [
            {
                "name": phase.name,
                "first_step": phase.first,
                "last_step": phase.last,
                "context": phase.context,
                "rows": self.rows(phase.first),
                "last_rows": self.rows(phase.last),
                "tokens": round(phase.tokens),
                "requested_tokens": round(phase.requested_tokens),
                "first_lr": self.lr(phase.first),
                "peak_lr": curve.schedule.peak,
                "last_lr": self.lr(phase.last),
                "capped": {
                    n: wanted
                    for n, wanted, fraction in zip(self.sources, phase.wanted, phase.fractions, strict=True)
                    if wanted > fraction * (1 + 1e-9)
                },
                "data": {n: fraction for n, fraction in zip(self.sources, phase.fractions, strict=True) if fraction},
            }
            for phase, curve in zip(self.phases, self.curves, strict=True)
        ]

    def _phase_index(self, step: int) -> int:
        return max(0, bisect_right(self.phases, step, key=lambda p: p.first) - 1)
