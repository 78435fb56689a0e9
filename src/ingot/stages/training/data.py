"""The data of a train stage: opened stores, planned rows, the batch of a step. No torch: `ingot trace` reads it too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, make_batch
from ingot.data.packing import BestFit, Concatenated, Mask, OnePerRow, RowPlan, make_row_plan
from ingot.model.config import ModelConfig
from ingot.objectives.settings import OBJECTIVES
from ingot.stages.job import Input, read_config
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer


@dataclass(frozen=True)
class Data:
    """The corpora of a stage, in name order, cut into rows of every context that a phase trains them with."""

    names: list[str]
    train: dict[int, dict[int, Source]]
    """Context -> place in `names` -> source; only what some phase of that context draws from."""
    held_out: list[Source]
    """Their held-out parts, in the longest rows that any phase trains: one yardstick for all phases."""

    def source_size(self, name: str, context: int) -> RowPlan:
        """Rows and targets of a corpus at a context."""
        return self.train[context][self.names.index(name)].plan

    @property
    def longest(self) -> list[Source]:
        """Each training source once, at the largest context it is trained with."""
        merged = {s: source for _, sources in sorted(self.train.items()) for s, source in sources.items()}
        return [source for _, source in sorted(merged.items())]

    def batch(self, line: Timeline, step: int) -> Batch:
        """The batch of a step: the rows that the objective learns from, and apart from them those that are replayed."""
        phase, source_B, row_B = line.at(step)
        sources = self.train[phase.context]
        again_B = np.array([sources[int(s)].replay for s in source_B])
        if not again_B.any():
            return make_batch(sources, source_B, row_B)
        if again_B.all():
            names = ", ".join(sorted({sources[int(s)].name for s in source_B}))
            raise UserError(
                f"data: the {len(row_B)} rows of step {step:,} are all replayed ones ({names}), so the objective has "
                "none to learn from; raise batch, or lower their share"
            )
        own = make_batch(sources, source_B[~again_B], row_B[~again_B])
        return replace(own, replay=make_batch(sources, source_B[again_B], row_B[again_B]))


def open_data(settings: TrainSettings, inputs: Mapping[str, Input], config: ModelConfig, tokenizer: Tokenizer) -> Data:
    """Open the stores of all phases and plan their rows.

    Args:
        settings: the stage.
        inputs: corpus -> its tokens stage.
        config: the model, with the context of phases that set none.
        tokenizer: what the stores must have been encoded with.
    """
    longest = max(settings.context_of(part, config.context) for part in settings.parts)
    train: dict[int, dict[int, Source]] = {}
    held_out: list[Source] = []
    names = sorted(inputs)
    for s, name in enumerate(names):
        opened = [Store.open(inputs[name].path / split, tokenizer=tokenizer.fingerprint) for split in ("train", "val")]
        rows = _Rows(settings, name, opened[0].content, _pad(settings, tokenizer))
        for part in settings.parts:
            context = settings.context_of(part, config.context)
            if name in settings.mixture(part) and s not in train.setdefault(context, {}):
                train[context][s] = rows.training(opened[0], context)
        held_out.append(rows.held_out(opened[1], longest))
    return Data(names, train, held_out)


@dataclass(frozen=True)
class _Rows:
    """How the documents of one corpus become rows."""

    settings: TrainSettings
    name: str
    content: str
    pad: int

    @property
    def kind(self) -> str:
        return self.settings.packing.kind_of(self.content)

    def training(self, store: Store, context: int) -> Source:
        ends, stride = np.asarray(store.ends), self.settings.packing.stride
        what = f"data.{self.name}"
        context = self._longest(context)
        return self._source(store, make_row_plan(self.kind, ends, context, stride, _mask(store), what, store.group))

    def held_out(self, store: Store, context: int) -> Source:
        ends = np.asarray(store.ends)
        match self.kind:
            case "concat":
                plan: RowPlan = Concatenated(ends, context, tail=True)
            case "whole":
                plan = OnePerRow(ends, self._longest(context), store.group)
            case _:
                plan = BestFit(ends, context, _mask(store))
        if plan.rows == 0:
            raise UserError(
                f"data.{self.name}: found no held-out text, expected some to measure the loss on; "
                f'raise holdout.share of stage {self.name}, or split it with holdout.by = "tail"'
            )
        return self._source(store, plan)

    def _longest(self, context: int) -> int:
        """Tokens of a row that the data may fill: a prompt leaves room for the longest completion."""
        return self.settings.objective.room_for_prompts(context) if self.content == "prompts" else context

    def _source(self, store: Store, plan: RowPlan) -> Source:
        packing = self.settings.packing
        replay = self.content not in OBJECTIVES[self.settings.objective.kind].formats
        return Source(self.name, store, plan, packing.isolates(self.content), self.pad, packing.ignore, replay)


def _mask(store: Store) -> Mask | None:
    return store.columns["mask"].read if "mask" in store.columns else None


def _pad(settings: TrainSettings, tokenizer: Tokenizer) -> int:
    """The id of padded places: as set, or the tokenizer's own (a token like any other, but never a target)."""
    pad = settings.packing.pad
    if pad is None:
        return tokenizer.pad
    if pad >= tokenizer.vocab:
        raise UserError(f"packing.pad: found {pad}, expected an id below the vocabulary of {tokenizer.vocab:,}")
    return pad


def starting_shape(settings: TrainSettings, inputs: Mapping[str, Input], tokenizer: Tokenizer) -> ModelConfig:
    """The shape of the model before any phase asks for a longer context: of `init`, or as set."""
    if settings.model:
        return settings.model.resolve(tokenizer.vocab)
    return read_config(inputs["init"].path)
