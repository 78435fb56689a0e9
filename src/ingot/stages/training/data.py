"""The data of a train stage: stores, row plans, and the batch of a step. No torch, because `ingot trace` uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, make_batch, share
from ingot.data.packing import BestFit, Concatenated, Mask, OnePerRow, RowPlan, make_row_plan
from ingot.model.config import ModelConfig
from ingot.objectives.settings import OBJECTIVES
from ingot.stages.job import Input, read_config
from ingot.stages.training.initial_layers import with_initial_layers
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer

_SCAN_TOKENS = 1 << 18
"""Tokens that are searched at once for the begin of text."""


@dataclass(frozen=True)
class Data:
    """The corpora of a stage as rows, for every context of a phase."""

    names: list[str]
    """Names of the corpora, sorted."""
    train: dict[int, dict[int, Source]]
    """Context -> index in `names` -> source, for the corpora of phases with that context."""
    held_out: list[Source]
    """Held-out splits in rows of the largest context, so that the losses of all phases are comparable. Sources that
    hold nothing out have none."""

    def source_size(self, name: str, context: int) -> RowPlan:
        """Rows and targets of a corpus in rows of a context (`SourceSizes`)."""
        return self.train[context][self.names.index(name)].plan

    @property
    def train_sources(self) -> list[Source]:
        """Each training source once, in rows of the largest context that it is trained with."""
        merged = {s: source for _, sources in sorted(self.train.items()) for s, source in sources.items()}
        return [source for _, source in sorted(merged.items())]

    def complete(self, timeline: Timeline) -> tuple[list[Source], bool]:
        """The sources of the objective, without replayed ones, of which a run uses every row; and whether all are."""
        epochs = timeline.epochs(self.source_size)
        own = [source for source in self.train_sources if not source.replay]
        complete = [source for source in own if epochs[source.name] >= 1 - 1e-9]  # epochs are rounded sums
        return complete, len(complete) == len(own)

    @property
    def held_out_tokens(self) -> dict[str, int]:
        """Corpus -> tokens of its held-out rows, padding included, as a forward pass has them."""
        return {s.name: s.plan.rows * s.plan.group * s.plan.context for s in self.held_out}

    @property
    def without_validation(self) -> list[str]:
        """The corpora that hold nothing out."""
        validated = {source.name for source in self.held_out}
        return [name for name in self.names if name not in validated]

    def batch(self, timeline: Timeline, step: int, rank: int = 0, size: int = 1) -> Batch:
        """The batch of a step, or the share of one of `size` ranks: rows for the objective, and separately the replayed
        rows. Only the rank's own rows are read.

        Raises:
            UserError: all rows are replayed ones.
        """
        phase, source_B, row_B = timeline.at(step)
        sources = self.train[phase.context]
        replay_B = np.array([sources[int(s)].replay for s in source_B])

        def own(selected_B: np.ndarray) -> Batch:
            index, filled = share(int(selected_B.sum()), rank, size)
            batch = make_batch(sources, source_B[selected_B][index], row_B[selected_B][index])
            return batch.without_labels(np.repeat(filled, batch.group)) if filled.any() else batch

        if not replay_B.any():
            return own(~replay_B)
        if replay_B.all():
            names = ", ".join(sorted({sources[int(s)].name for s in source_B}))
            raise UserError(
                f"data: found only replayed rows ({names}) among the {len(row_B)} rows of step {step:,}, expected some "
                "for the objective; raise batch, or lower the fraction of replayed corpora"
            )
        return replace(own(~replay_B), replay=own(replay_B))


def open_data(settings: TrainSettings, inputs: Mapping[str, Input], config: ModelConfig, tokenizer: Tokenizer) -> Data:
    """Open the stores of all phases and plan their rows.

    Args:
        settings: the stage.
        inputs: corpus -> its tokens stage.
        config: the initial model, whose context applies to phases that set none.
        tokenizer: the tokenizer of the stores.
    """
    phases = settings.phases_or_default
    longest = max(settings.context_of(phase, config.context) for phase in phases)
    train: dict[int, dict[int, Source]] = {}
    held_out: list[Source] = []
    names = sorted(inputs)
    for s, name in enumerate(names):
        stores = [Store.open(inputs[name].path / split, tokenizer=tokenizer.fingerprint) for split in ("train", "val")]
        planner = _RowPlanner(settings, name, stores[0].content, _pad(settings, tokenizer))
        for phase in phases:
            context = settings.context_of(phase, config.context)
            if name in settings.mixture(phase) and s not in train.setdefault(context, {}):
                train[context][s] = planner.training(stores[0], context)
        if stores[1].documents:
            held_out.append(planner.held_out(stores[1], longest))
    return Data(names, train, held_out)


@dataclass(frozen=True)
class _RowPlanner:
    """Plans the rows of one corpus."""

    settings: TrainSettings
    name: str
    content: str
    pad: int

    @property
    def kind(self) -> str:
        return self.settings.packing.resolved_kind(self.content)

    def training(self, store: Store, context: int) -> Source:
        ends, stride = np.asarray(store.ends), self.settings.packing.stride
        where = f"data.{self.name}"
        context = self._usable_context(context)
        return self._source(store, make_row_plan(self.kind, ends, context, stride, _mask(store), where, store.group))

    def held_out(self, store: Store, context: int) -> Source:
        ends = np.asarray(store.ends)
        match self.kind:
            case "concat":
                plan: RowPlan = Concatenated(ends, context, tail=True)
            case "one-per-row":
                plan = OnePerRow(ends, self._usable_context(context), store.group)
            case _:
                plan = BestFit(ends, context, _mask(store))
        if plan.rows == 0:
            raise UserError(
                f"data.{self.name}: found no held-out text that fits a row, expected some to measure the loss on; "
                f"raise holdout.fraction of stage {self.name}, or set it to 0 to train without validation"
            )
        return self._source(store, plan)

    def _usable_context(self, context: int) -> int:
        """Tokens of a row that documents may fill; a prompt leaves room for the longest completion."""
        return self.settings.objective.max_prompt_tokens(context) if self.content == "prompts" else context

    def _source(self, store: Store, plan: RowPlan) -> Source:
        packing = self.settings.packing
        replay = self.content not in OBJECTIVES[self.settings.objective.kind].formats
        return Source(self.name, store, plan, packing.isolates(self.content), self.pad, packing.ignore, replay)


def _mask(store: Store) -> Mask | None:
    return store.columns["mask"].read if "mask" in store.columns else None


def _pad(settings: TrainSettings, tokenizer: Tokenizer) -> int:
    """The id of padding: the setting, or the tokenizer's. Padding is never a target."""
    pad = settings.packing.pad
    if pad is None:
        return tokenizer.pad
    if pad >= tokenizer.vocab:
        raise UserError(f"packing.pad: found {pad}, expected an id below the vocabulary of {tokenizer.vocab:,}")
    return pad


def initial_config(settings: TrainSettings, inputs: Mapping[str, Input], tokenizer: Tokenizer) -> ModelConfig:
    """Configuration of the initial model: of `init`, or of the settings. A phase may extend its context."""
    if settings.model:
        return settings.model.resolve(tokenizer.vocab)
    return with_initial_layers(read_config(inputs["init"].path), settings.init_layers)


def unseen_start(tokenizer: Tokenizer, data: Data) -> str:
    """A message about a begin of text that generation will use and that training does not see, or ""."""
    stores = [source.store for source in data.train_sources]
    start = tokenizer.start_ids
    if not start or any(store.content == "text" for store in stores):
        return ""
    spans = ((store, first) for store in stores for first in range(0, store.tokens, _SCAN_TOKENS))
    for store, first in spans:  # most often the first ends the search; reading a span verifies its checksums
        if np.isin(store.ids.read(first, min(first + _SCAN_TOKENS, store.tokens)), start).any():
            return ""
    name = tokenizer.token_bytes(start[0]).decode(errors="replace")
    return (
        f"use `ingot chat`: `ingot generate` and tasks of running text begin with {name}, which these conversations do "
        "not contain; add text to the stage's data if the model is to continue texts, too"
    )
