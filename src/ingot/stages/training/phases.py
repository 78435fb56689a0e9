"""From a stage's settings to its timeline: the length, batch sizes and learning-rate curve of each phase.

Lengths in tokens round up to whole steps, and the rounding does not add up: a phase ends with the first step at which
all phases so far have had their tokens. What a phase leaves out is the stage's, and what is the stage's runs along the
whole stage: a ramp goes on where the phase before left it, a learning-rate curve reaches through all phases. What a
phase sets itself begins and ends with it.
"""

import math
from dataclasses import replace

from ingot.core.errors import UserError
from ingot.data.batch_size import BatchSizes, constant, ramp
from ingot.data.sampler import Order
from ingot.model.config import ModelConfig
from ingot.objectives.settings import OBJECTIVES
from ingot.optim.schedule import schedule
from ingot.stages.training.settings import PhaseSettings, RampSettings, TrainSettings
from ingot.stages.training.timeline import AssumedSize, Curve, Phase, SourceSize, SourceSizes, Timeline
from ingot.train.duration import Duration


def rows_of_a_draw(settings: TrainSettings) -> int:
    """Rows of forward passes that a drawn row becomes: both sides of a pair, all samples of a prompt."""
    return 2 if "pairs" in OBJECTIVES[settings.objective.kind].formats else settings.objective.samples


def longest(settings: TrainSettings, config: ModelConfig) -> ModelConfig:
    """The shape of the model that is trained: its context is the largest of the phases' (`init` never gets shorter).

    Raises:
        UserError: the model's learned positions do not reach that far.
    """
    context = settings.longest(config.context)
    if settings.init and context > config.context and config.positions == "learned":
        raise UserError(
            f"phases: found a context of {context:,}, expected at most {config.context:,}: the positions of "
            f"'{settings.init}' are a learned table of that length; shorten the context, or start from a model with "
            'positions = "rope"'
        )
    return config.model_copy(update={"context": context})


def timeline(settings: TrainSettings, config: ModelConfig, sizes: SourceSizes, seed: int = 0) -> Timeline:
    """Lay out the phases of a stage.

    Args:
        settings: the stage.
        config: the model, with the context of phases that set none (of `model`, or of the stage in `init`).
        sizes: sizes of the sources, for example `assumed_size`.
        seed: names the shuffle.

    Raises:
        UserError: a length is counted in epochs of a source whose size is unknown.
    """
    sources = tuple(sorted(settings.corpora))
    laid = _Phases(settings, config, sources, sizes, seed)
    phases = tuple(laid.add(part) for part in settings.parts)
    return Timeline(sources, phases, _curves(settings, config, phases))


class _Phases:
    """Phases one after another; what each leaves behind is where the next begins."""

    def __init__(
        self, settings: TrainSettings, config: ModelConfig, sources: tuple[str, ...], sizes: SourceSizes, seed: int
    ):
        self.settings, self.config, self.sources, self.sizes, self.seed = settings, config, sources, sizes, seed
        self.parameters = longest(settings, config).parameters
        self.total_share = sum(p.share or 0 for p in settings.parts)
        self.steps, self.tokens = 0, 0.0
        self.due_steps, self.due_tokens = 0.0, 0.0  # exact lengths of the phases so far, before rounding
        self.drawn: dict[int, tuple[int, ...]] = {}  # context -> how often each source was drawn

    def add(self, part: PhaseSettings) -> Phase:
        """The next phase."""
        context = self.settings.context_of(part, self.config.context)
        data = self.settings.mixture(part)
        total = sum(data.values())
        shares = tuple(data.get(name, 0.0) / total for name in self.sources)
        sources = [self.sizes(name, context) if name in data else AssumedSize(1.0, 0, 0) for name in self.sources]
        weights = tuple(share / source.row_targets for share, source in zip(shares, sources, strict=True))
        row_targets = 1 / sum(weights)
        epoch = _epoch(shares, sources)
        sizes = self._batch_sizes(part, context, row_targets, epoch)
        steps = self._steps(part, sizes, row_targets, epoch)
        drawn = self.drawn.get(context, (0,) * len(self.sources))
        order = Order(tuple(source.rows for source in sources), weights, self.seed, drawn)
        phase = Phase(part.name, self.steps + 1, steps, context, sizes, shares, row_targets, self.tokens, order)
        self.drawn[context] = order.drawn_after(phase.rows)
        self.steps, self.tokens = phase.last, self.tokens + phase.tokens
        return phase

    def _batch_sizes(self, part: PhaseSettings, context: int, row_targets: float, epoch: float | None) -> BatchSizes:
        """A phase's own ramp begins with it; one of the stage goes on through all phases without an own batch."""
        batch = part.batch or self.settings.batch or default_rows(self.config, context)
        if not isinstance(batch, RampSettings):
            return constant(batch)
        own, over = part.batch is not None, Duration.parse(batch.over)
        if over.unit == "steps":
            return ramp(batch.start, batch.to, max(1, round(over.amount)), True, 0 if own else self.steps)
        rows = over.tokens(epoch, self.parameters) / row_targets
        done = 0 if own else round(self.tokens / row_targets)
        return ramp(batch.start, batch.to, max(1, round(rows)), False, done)

    def _steps(self, part: PhaseSettings, sizes: BatchSizes, row_targets: float, epoch: float | None) -> int:
        """Whole steps of the phase, at least one."""
        length, share = Duration.parse(part.duration or self.settings.duration or ""), 1.0
        if part.share is not None:
            share = part.share / self.total_share
        if length.unit == "steps":
            self.due_steps += share * length.amount
            steps = max(1, round(self.due_steps) - self.steps)
            self.due_tokens = self.tokens + sizes.before(steps + 1) * row_targets
            return steps
        self.due_tokens += share * length.tokens(epoch, self.parameters)
        rows = math.ceil((self.due_tokens - self.tokens) / row_targets * (1 - 1e-12))
        steps = sizes.step_of(max(1, rows) - 1)
        self.due_steps = self.steps + steps
        return steps


def default_rows(config: ModelConfig, context: int) -> int:
    """Rows of an update where none are set: 512 x depth^2 tokens, since larger models learn from cleaner gradients."""
    return max(1, 512 * config.depth**2 // context)


def _epoch(shares: tuple[float, ...], sizes: list[SourceSize]) -> float | None:
    """Targets in which the source with the largest share is seen once; None where its size is unknown."""
    share, size = max(zip(shares, sizes, strict=True), key=lambda pair: pair[0])
    return None if size.targets is None else size.targets / share


def _curves(settings: TrainSettings, config: ModelConfig, phases: tuple[Phase, ...]) -> tuple[Curve, ...]:
    """The curve of each phase: the stage's, which runs through all of them, or its own from its first step to its last.

    An own curve warms up from the rate at which the phase before ended, so nothing jumps but what is told to.
    """
    optim, tuned = settings.optim, settings.init is not None and settings.adapter is None
    whole = Curve(schedule(optim, phases[-1].last, config.width, tuned), 0)
    curves: list[Curve] = []
    for part, phase in zip(settings.parts, phases, strict=True):
        if not part.has_curve:
            curves.append(whole)
            continue
        before = curves[-1].lr(phase.first - 1) if curves else 0.0
        own = schedule(part.curve(optim, first=not curves, lr=before or None), phase.steps, config.width, tuned)
        curves.append(Curve(replace(own, start=before), phase.first - 1))
    return tuple(curves)
