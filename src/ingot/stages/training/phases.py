"""Builds the timeline of a train stage: the length, batch sizes and learning-rate curve of each phase.

A length in tokens is rounded up to whole steps. Rounding errors do not accumulate: a phase ends with the first step at
which all phases so far have had their tokens. A ramp or a curve in the stage's settings spans all phases; one in a
phase's settings begins and ends with the phase.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from ingot.core.errors import UserError
from ingot.data.batch_size import BatchSizes, constant, ramp
from ingot.data.mixtures import capped, tempered
from ingot.data.sampler import Order
from ingot.model.config import ModelConfig, max_context
from ingot.objectives.settings import OBJECTIVES
from ingot.optim.schedule import schedule
from ingot.stages.training.settings import PhaseSettings, RampSettings, TrainSettings
from ingot.stages.training.timeline import AssumedSize, Curve, Phase, SourceSize, SourceSizes, Timeline
from ingot.train.duration import Duration

MIN_UPDATES = 100
"""Updates that a default batch leaves a duration in tokens or epochs; a short one learns little in fewer."""


def rows_per_draw(settings: TrainSettings) -> int:
    """Rows of a forward pass for each row that is drawn: both sides of a pair, or all samples of a prompt."""
    return 2 if "pairs" in OBJECTIVES[settings.objective.kind].formats else settings.objective.samples


def trained_config(settings: TrainSettings, config: ModelConfig) -> ModelConfig:
    """Configuration of the trained model. Its context is the largest of all phases, and at least that of `init`.

    Args:
        settings: the stage.
        config: the initial model.

    Raises:
        UserError: the context is longer than the model of `init` was made for.
    """
    context = settings.trained_context(config.context, max_context(config.context, config.rope_scaling))
    return config.model_copy(update={"context": context})


def build_timeline(settings: TrainSettings, config: ModelConfig, sizes: SourceSizes, seed: int = 0) -> Timeline:
    """Build the timeline of a stage.

    Args:
        settings: the stage.
        config: the initial model, whose context applies to phases that set none.
        sizes: sizes of the sources; `assumed_size` before they are encoded.
        seed: seed of the shuffle.

    Raises:
        UserError: a length is given in epochs of a source whose size is unknown.
    """
    sources = tuple(sorted(settings.corpora))
    builder = _PhaseBuilder(settings, config, sources, sizes, seed)
    phases = tuple(builder.add(phase) for phase in settings.phases_or_default)
    return Timeline(sources, phases, _curves(settings, config, phases))


class _PhaseBuilder:
    """Builds the phases in order; each one begins where the previous one ended."""

    def __init__(
        self, settings: TrainSettings, config: ModelConfig, sources: tuple[str, ...], sizes: SourceSizes, seed: int
    ):
        self.settings, self.config, self.sources, self.sizes, self.seed = settings, config, sources, sizes, seed
        self.parameters = trained_config(settings, config).parameters
        self.total_fraction = sum(p.fraction or 0 for p in settings.phases_or_default)
        self.steps, self.tokens = 0, 0.0
        self.exact_steps, self.exact_tokens = 0.0, 0.0  # lengths of the phases so far, before rounding
        self.drawn: dict[tuple[int, bool], tuple[int, ...]] = {}  # (context, shuffled?) -> rows drawn from each source

    def add(self, settings: PhaseSettings) -> Phase:
        """Build the next phase. A corpus with `max_epochs` gets so small a fraction that it lasts.

        Raises:
            UserError: all corpora together do not last.
        """
        context = self.settings.context_of(settings, self.config.context)
        data = self.settings.mixture(settings)
        sources = [self.sizes(name, context) if name in data else AssumedSize(1.0, 0, 0) for name in self.sources]
        wanted = self._wanted_fractions(data, sources)
        caps = self._rows_left(sources, context)
        spare, limits = [0] * len(sources), [math.inf] * len(sources)
        before = self.exact_steps, self.exact_tokens
        while True:
            self.exact_steps, self.exact_tokens = before
            fractions = capped(wanted, limits)
            if fractions is None:
                raise self._used_up(settings, data)
            phase = self._phase(settings, context, sources, wanted, tuple(fractions))
            after = phase.order.drawn_after(phase.rows)
            drawn = [b - a for a, b in zip(phase.order.drawn or (0,) * len(sources), after, strict=True)]
            over = [s for s, cap in enumerate(caps) if drawn[s] > cap]
            if not over:
                break
            for s in over:
                spare[s] += drawn[s] - int(caps[s]) if math.isfinite(limits[s]) else 0
            for s, cap in enumerate(caps):
                if s in over or math.isfinite(limits[s]):
                    limits[s] = max(0.0, cap - spare[s]) * sources[s].row_targets / (phase.rows * phase.row_targets)
        self.drawn[context, phase.order.shuffled] = after
        self.steps, self.tokens = phase.last, self.tokens + phase.tokens
        return phase

    def _phase(
        self,
        settings: PhaseSettings,
        context: int,
        sources: list[SourceSize],
        wanted: tuple[float, ...],
        fractions: tuple[float, ...],
    ) -> Phase:
        weights = tuple(fraction / source.row_targets for fraction, source in zip(fractions, sources, strict=True))
        row_targets = 1 / sum(weights)
        epoch = _epoch_targets(wanted, sources)
        sizes = self._batch_sizes(settings, context, row_targets, epoch)
        before = self.exact_tokens
        steps = self._steps(settings, sizes, row_targets, epoch)
        requested = self.exact_tokens - before
        shuffled = self.settings.is_shuffled(settings)
        drawn = self.drawn.get((context, shuffled), (0,) * len(self.sources))
        order = Order(tuple(source.rows for source in sources), weights, self.seed, drawn, shuffled)
        first, done = self.steps + 1, self.tokens
        return Phase(
            settings.name, first, steps, context, sizes, fractions, wanted, row_targets, requested, done, order
        )

    def _wanted_fractions(self, data: Mapping[str, float], sources: list[SourceSize]) -> tuple[float, ...]:
        """The fractions of the mixture, at the stage's temperature if the sizes are known."""
        weights = [data.get(name, 0.0) for name in self.sources]
        targets = [source.targets for source in sources]
        if self.settings.temperature is None or None in targets:
            return tuple(weight / sum(weights) for weight in weights)
        return tuple(tempered(weights, [float(n or 0) for n in targets], self.settings.temperature))

    def _rows_left(self, sources: list[SourceSize], context: int) -> list[float]:
        """Rows of each source that `max_epochs` leaves; infinity without it, or before its size is known."""
        left: list[float] = []
        for s, (name, source) in enumerate(zip(self.sources, sources, strict=True)):
            most = self.settings.max_epochs.get(name)
            if most is None or not source.targets:
                left.append(math.inf)
                continue
            used = sum(drawn[s] / self.sizes(name, other).rows for (other, _), drawn in self.drawn.items() if drawn[s])
            left.append(math.floor((most - used) * source.rows + 1e-9))
        return left

    def _used_up(self, settings: PhaseSettings, data: Mapping[str, float]) -> UserError:
        where = "" if settings.name == "all" else f"phase {settings.name}: "
        caps = ", ".join(f"{name} {self.settings.max_epochs[name]:g}" for name in data)
        return UserError(
            f"max_epochs: {where}all corpora are used up before the duration ends (epochs at most: {caps}); shorten "
            "duration, raise max_epochs, or add text"
        )

    def _batch_sizes(
        self, settings: PhaseSettings, context: int, row_targets: float, epoch: float | None
    ) -> BatchSizes:
        """Batch sizes of a phase. Its own ramp begins with it; a ramp of the stage continues from earlier phases."""
        batch = settings.batch or self.settings.batch or self._default_rows(settings, context, row_targets, epoch)
        if not isinstance(batch, RampSettings):
            return constant(batch)
        own, over = settings.batch is not None, Duration.parse(batch.over)
        if over.unit == "steps":
            return ramp(batch.start, batch.to, max(1, round(over.amount)), True, 0 if own else self.steps)
        rows = over.tokens(epoch, self.parameters) / row_targets
        done = 0 if own else round(self.tokens / row_targets)
        return ramp(batch.start, batch.to, max(1, round(rows)), False, done)

    def _default_rows(self, settings: PhaseSettings, context: int, row_targets: float, epoch: float | None) -> int:
        """`default_rows`, for the rows of the duration that the phase has or is a fraction of."""
        length = Duration.parse(settings.duration or self.settings.duration or "")
        duration = None if length.unit == "steps" else length.tokens(epoch, self.parameters) / row_targets
        smallest = OBJECTIVES[self.settings.objective.kind].smallest_batch
        return max(default_rows(self.config, context, duration), smallest)

    def _steps(self, settings: PhaseSettings, sizes: BatchSizes, row_targets: float, epoch: float | None) -> int:
        """Steps of the phase; at least one."""
        length, fraction = Duration.parse(settings.duration or self.settings.duration or ""), 1.0
        if settings.fraction is not None:
            fraction = settings.fraction / self.total_fraction
        if length.unit == "steps":
            self.exact_steps += fraction * length.amount
            steps = max(1, round(self.exact_steps) - self.steps)
            self.exact_tokens = self.tokens + sizes.rows_before(steps + 1) * row_targets
            return steps
        self.exact_tokens += fraction * length.tokens(epoch, self.parameters)
        rows = math.ceil((self.exact_tokens - self.tokens) / row_targets * (1 - 1e-12))
        steps = sizes.step_of(max(1, rows) - 1)
        self.exact_steps = self.steps + steps
        return steps


def default_rows(config: ModelConfig, context: int, duration: float | None = None) -> int:
    """Default batch size in rows.

    512 x depth^2 tokens, because larger models benefit from less noisy gradients; less where the duration would make
    fewer than `MIN_UPDATES` updates: then the largest power of two that makes so many, or 1.

    Args:
        config: the initial model.
        context: tokens of a row.
        duration: rows of the duration; None if it is given in steps.
    """
    rows = max(1, 512 * config.depth**2 // context)
    if duration is None or rows <= duration / MIN_UPDATES:
        return rows
    return 2 ** math.floor(math.log2(max(1.0, duration / MIN_UPDATES)))


def default_batch_reason(settings: TrainSettings, config: ModelConfig, phase: Phase) -> str:
    """Why a phase has its default batch; "" if the recipe sets the batch."""
    own = next(p for p in settings.phases_or_default if p.name == phase.name)
    if own.batch or settings.batch:
        return ""
    if phase.sizes.rows(1) == default_rows(config, phase.context):
        return "512 x depth^2 tokens by default"
    return f"by default so few that the duration makes {MIN_UPDATES} updates or more, if it can"


def _epoch_targets(fractions: tuple[float, ...], sizes: list[SourceSize]) -> float | None:
    """Targets of all sources during one epoch of the source with the largest fraction; None if its size is unknown."""
    fraction, size = max(zip(fractions, sizes, strict=True), key=lambda pair: pair[0])
    return None if size.targets is None else size.targets / fraction


def _curves(settings: TrainSettings, config: ModelConfig, phases: tuple[Phase, ...]) -> tuple[Curve, ...]:
    """The learning-rate curve of each phase: the stage's, which spans all phases, or the phase's own.

    A phase's own curve starts at the rate at the end of the previous phase.

    Raises:
        UserError: that rate is 0, and the phase names no other.
    """
    whole = settings.adapter is None and settings.init_layers is None
    optim, finetuned = settings.optim, settings.init is not None and whole
    stage_curve = Curve(schedule(optim, phases[-1].last, config.width, finetuned), 0)
    curves: list[Curve] = []
    for own, phase in zip(settings.phases_or_default, phases, strict=True):
        if not own.has_curve:
            curves.append(stage_curve)
            continue
        previous = curves[-1].lr(phase.first - 1) if curves else 0.0
        if curves and not previous and own.lr is None:
            raise UserError(
                f"phases: found '{phase.name}' without lr after a phase that ends at rate 0, expected the peak of its "
                "rates; set its lr"
            )
        curve = schedule(own.curve(optim, first=not curves, lr=previous or None), phase.steps, config.width, finetuned)
        curves.append(Curve(replace(curve, start=previous), phase.first - 1))
    return tuple(curves)
