"""The mixture of a train stage: opened stores, planned rows, and the order they are trained in. No torch, so that
`ingot trace` answers at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import UserError
from ingot.data.batches import Source
from ingot.data.order import Order
from ingot.data.packing import BestFit, Windows, make_plan
from ingot.model.settings import ModelConfig
from ingot.stages.job import Input, open_stage
from ingot.stages.load import read_config
from ingot.stages.settings import TrainSettings
from ingot.stages.text import TOKENIZER
from ingot.text.store import Store
from ingot.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """The mixture: training sources in name order with their shares of tokens, and the held-out counterparts."""

    train: list[Source]
    held_out: list[Source]
    shares: list[float]

    def order(self, batch: int, seed: int) -> Order:
        """Shares of tokens become shares of rows, since rows of different sources hold different numbers of targets."""
        rows = tuple(s.plan.rows for s in self.train)
        weights = tuple(share / s.plan.row_targets for share, s in zip(self.shares, self.train, strict=True))
        return Order(rows, weights, batch, seed)

    @property
    def row_targets(self) -> float:
        """Targets of a row of the mixture, on average."""
        return sum(self.shares) / sum(w / s.plan.row_targets for w, s in zip(self.shares, self.train, strict=True))

    @property
    def epoch_targets(self) -> float:
        """Targets of the mixture in which the source with the largest share is seen once."""
        share, source = max(zip(self.shares, self.train, strict=True), key=lambda pair: pair[0])
        return source.plan.targets / (share / sum(self.shares))


def open_data(settings: TrainSettings, inputs: Mapping[str, Input], context: int, tokenizer: Tokenizer) -> Data:
    """Open the stores of the mixture and plan their rows."""
    train_sources, held_out, shares = [], [], []
    pad = tokenizer.specials.get("<|pad|>", 0)
    for name, tokens in inputs.items():
        stores = [Store.open(tokens.path / split, tokenizer=tokenizer.fingerprint) for split in ("train", "val")]
        masked = "mask" in stores[0].columns
        kind = settings.packing.kind or ("best-fit" if masked else "concat")
        isolate = kind == "best-fit" if settings.packing.isolate is None else settings.packing.isolate
        ends = [np.asarray(s.ends) for s in stores]
        plan = make_plan(kind, ends[0], context, settings.packing.stride, masked, f"data.{name}")
        val = Windows(ends[1], context, tail=True) if kind == "concat" else BestFit(ends[1], context, truncate=masked)
        if val.rows == 0:
            raise UserError(
                f"data.{name}: found no held-out text, expected some to measure the loss on; "
                f'raise holdout.share of stage {name}, or split it with holdout.by = "tail"'
            )
        train_sources.append(Source(name, stores[0], plan, isolate, pad))
        held_out.append(Source(name, stores[1], val, isolate, pad))
        shares.append(settings.data[name])
    return Data(train_sources, held_out, shares)


def batch_rows(settings: TrainSettings, config: ModelConfig) -> int:
    """Rows of one update: as set, or 512 x depth^2 tokens' worth, since larger models learn from cleaner gradients."""
    return settings.batch or max(1, 512 * config.depth**2 // config.context)


@dataclass(frozen=True)
class TracedRow:
    """One row of a batch: where each of its pieces comes from, and its token ids."""

    source: str
    row: int
    pieces: list[dict[str, Any]]
    """Per document: identity (source, path, offset ...), first and last token in it, text."""
    ids: np.ndarray


def trace(stage: Path, step: int) -> Iterator[TracedRow]:
    """The rows of the batch of one step of a train stage, past or future, from the recipe and the step alone."""
    record = open_stage(stage)
    if record["kind"] != "train":
        raise UserError(f"{stage}: is a {record['kind']} stage, expected a train stage, such as runs/NAME/base")
    settings = TrainSettings.model_validate(record["settings"])
    config = read_config(stage)
    tokenizer = load_tokenizer(stage / TOKENIZER)
    root = stage.resolve().parent.parent
    inputs = {r: Input(i["name"], i["key"], root / i["dir"]) for r, i in record["inputs"].items()}
    by_name = {r.removeprefix("data:"): i for r, i in sorted(inputs.items()) if r.startswith("data:")}
    data = open_data(settings, by_name, config.context, tokenizer)
    order = data.order(batch_rows(settings, config), record["seed"])
    for s, row in zip(*order.at(step), strict=True):
        source = data.train[s]
        pieces, ids = [], []
        for piece in source.plan.slices(int(row)):
            begin = int(source.store.ends[piece.document - 1]) if piece.document else 0
            piece_ids = source.store.ids.read(piece.start, piece.stop)
            ids.append(piece_ids)
            identity = source.store.identity(piece.document)
            place = {"first_token": piece.start - begin, "tokens": piece.stop - piece.start}
            pieces.append({**identity, **place, "text": tokenizer.decode(piece_ids)})
        yield TracedRow(source.name, int(row), pieces, np.concatenate(ids))
