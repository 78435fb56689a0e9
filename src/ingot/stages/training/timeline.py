"""What a train stage does at each step: phase, rows, learning rate. A pure function of the step, before any training.

A stage is a list of phases (usually one), and a phase is a mixture, a context, a batch size (or a ramp of it) and a
length. From the recipe and the sizes of the stores follow, for any step and without looking at the steps between: which
rows of which source are in its batch, how many tokens have been trained on, and the learning rate. Nothing of it is
saved, so a run that was killed in one phase goes on in the next, and `ingot trace` looks into both.

- Within a phase, sources are mixed by error diffusion: its shares are exact in any window of rows.
- A source goes on where the phase before stopped: no row is repeated while there is an unseen one. Rows of another
  context are other rows, cut and shuffled anew, so each context has its own count.
- After the last phase comes nothing else: its batch, its mixture and the end of its curve go on.

Made by `stages/training/phases.py`. Free of torch, because `ingot plan` and `ingot trace` print it.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.data.batch_size import BatchSizes
from ingot.data.sampler import Order
from ingot.optim.schedule import Schedule


class SourceSize(Protocol):
    """What there is of a source in rows of one context (`data/packing.py` makes them, `AssumedSize` stands in)."""

    @property
    def rows(self) -> int: ...
    @property
    def targets(self) -> int | None: ...
    @property
    def row_targets(self) -> float: ...


@dataclass(frozen=True)
class AssumedSize:
    """A source that is not encoded yet: every row is full, as running text is; how many there are is unknown."""

    row_targets: float
    targets: int | None = None
    rows: int = 1


SourceSizes = Callable[[str, int], SourceSize]
"""(source, context) -> its size."""


def assumed_size(source: str, context: int) -> SourceSize:
    """The sizes of sources of running text before they are encoded; durations in epochs are then unknown."""
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
    """Rows of its steps, counted from 1 within the phase."""
    shares: tuple[float, ...]
    """Share of its tokens from each source, in the order of `Timeline.sources`; 0 for sources of other phases."""
    row_targets: float
    """Targets of one of its rows, on average."""
    tokens_before: float
    order: Order

    def rows_after(self, step: int) -> int:
        """Rows of the phase up to and with a step of the run."""
        return self.sizes.before(step - self.first + 2)

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


@dataclass(frozen=True)
class Timeline:
    """All steps of a train stage. Steps are 1-based; beyond the last one the last phase goes on."""

    sources: tuple[str, ...]
    """All corpora of all phases, by name; a row's source is a place in this list."""
    phases: tuple[Phase, ...]
    curves: tuple[Curve, ...]
    """The learning rate of each phase."""

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return self.phases[-1].last

    @property
    def context(self) -> int:
        """Tokens of its longest rows."""
        return max(phase.context for phase in self.phases)

    @property
    def peak(self) -> float:
        """The highest learning rate any phase aims at."""
        return max(c.schedule.peak for c in self.curves)

    @property
    def largest(self) -> int:
        """Rows of the largest step."""
        return max(p.sizes.rows(p.steps) for p in self.phases)

    @property
    def shares(self) -> list[float]:
        """Share of each source in the tokens of the whole run."""
        total = self.tokens(self.steps)
        return [sum(p.tokens * p.shares[s] for p in self.phases) / total for s in range(len(self.sources))]

    def phase(self, step: int) -> Phase:
        """The phase of a step."""
        return self.phases[self._place(step)]

    def rows(self, step: int) -> int:
        """Rows in the batch of a step."""
        phase = self.phase(step)
        return phase.sizes.rows(step - phase.first + 1)

    def at(self, step: int) -> tuple[Phase, np.ndarray, np.ndarray]:
        """Phase, sources and row numbers (both int64, shape (rows,)) of a step: rows of that phase's context."""
        phase = self.phase(step)
        own = step - phase.first + 1
        return phase, *phase.order.at(phase.sizes.before(own), phase.sizes.rows(own))

    def steps_of(self, source: int, context: int, row: int) -> list[int]:
        """The steps of the run that show a row of a source, first to last: `at` backwards."""
        drawing = (p for p in self.phases if p.context == context and p.shares[source])
        return [
            phase.first - 1 + phase.sizes.step_of(place)
            for phase in drawing
            for place in phase.order.places(source, row, phase.rows)
        ]

    def tokens(self, step: int) -> float:
        """Targets trained on after a step, labels that a mask removes included; exact where no row is padded."""
        phase = self.phase(step)
        return phase.tokens_before + phase.rows_after(step) * phase.row_targets

    def lr(self, step: int) -> float:
        """Learning rate of the update of a step."""
        return self.curves[self._place(step)].lr(step)

    def unfinished_warmups(self) -> list[int]:
        """Steps of each warmup that is longer than the phases that follow its curve."""
        last = {curve: phase.last for curve, phase in zip(self.curves, self.phases, strict=True)}
        return [curve.schedule.warmup for curve, step in last.items() if curve.schedule.warmup > step - curve.origin]

    def epochs(self, sizes: SourceSizes) -> dict[str, float]:
        """How often the whole run shows each source, counted in tokens."""
        out = dict.fromkeys(self.sources, 0.0)
        for phase in self.phases:
            drawn = phase.order.drawn_after(phase.rows)
            for s, name in enumerate(self.sources):
                if phase.shares[s]:
                    size = sizes(name, phase.context)
                    assert size.targets, "an assumed size has no epochs"
                    out[name] += (drawn[s] - phase.order.drawn[s]) * size.row_targets / size.targets
        return out

    def summary(self) -> list[dict[str, Any]]:
        """The phases as flat rows, for logs and tables: steps, rows, tokens, learning rate at both ends, mixture."""
        return [
            {
                "name": phase.name,
                "first_step": phase.first,
                "last_step": phase.last,
                "context": phase.context,
                "rows": self.rows(phase.first),
                "last_rows": self.rows(phase.last),
                "tokens": round(phase.tokens),
                "first_lr": self.lr(phase.first),
                "peak_lr": curve.schedule.peak,
                "last_lr": self.lr(phase.last),
                "data": {name: share for name, share in zip(self.sources, phase.shares, strict=True) if share},
            }
            for phase, curve in zip(self.phases, self.curves, strict=True)
        ]

    def _place(self, step: int) -> int:
        return max(0, bisect_right(self.phases, step, key=lambda p: p.first) - 1)
