"""Which documents are in the batch of a step, and in which steps a document is: past or future, from the recipe alone.

Both are the order of training read forwards and backwards; nothing was recorded while training. No torch, so that
`ingot trace` answers at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import UserError
from ingot.stages.job import TOKENIZER, in_role, inputs_of, open_stage
from ingot.stages.training.data import Data, open_data, starting_shape
from ingot.stages.training.phases import timeline
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TracedRow:
    """One row of a batch: where each of its pieces comes from, and its token ids."""

    source: str
    row: int
    pieces: list[dict[str, Any]]
    """Per document: identity (source, path, offset ...), first and last token in it, text."""
    ids: np.ndarray


def trace(stage: Path, step: int) -> Iterator[TracedRow]:
    """The rows of the batch of one step of a train stage."""
    data, line, tokenizer = open_trained(stage)
    phase, source_B, row_B = line.at(step)
    for s, row in zip(source_B.tolist(), row_B.tolist(), strict=True):
        source = data.train[phase.context][s]
        pieces, ids = [], []
        for piece in source.plan.slices(row):
            begin, _ = source.store.span(piece.document)
            piece_ids = source.store.ids.read(piece.start, piece.stop)
            ids.append(piece_ids)
            identity = source.store.identity(piece.document)
            place = {"first_token": piece.start - begin, "tokens": piece.stop - piece.start}
            pieces.append({**identity, **place, "text": tokenizer.decode(piece_ids)})
        yield TracedRow(source.name, row, pieces, np.concatenate(ids))


def trace_document(stage: Path, path: str) -> Iterator[dict[str, Any]]:
    """The documents of a file, each with the steps that show some of it: {corpus, tokens, steps, identity ...}.

    Args:
        stage: a train stage.
        path: as the documents say, or the end of it (a file's name).

    Raises:
        UserError: no document of the stage's corpora is from there, or only held-out ones.
    """
    data, line, _ = open_trained(stage)
    found = 0
    for s, source in enumerate(data.longest):
        for document in source.store.find(path):
            found += 1
            steps = {
                step
                for context, sources in data.train.items()
                if s in sources
                for row in sources[s].plan.rows_of(document)
                for step in line.steps_of(s, context, row)
            }
            first, last = source.store.span(document)
            yield {
                "corpus": source.name,
                **source.store.identity(document),
                "tokens": last - first,
                "steps": sorted(steps),
            }
    if not found:
        held_out = [source.name for source in data.held_out if source.store.find(path)]
        if held_out:
            raise UserError(f"{path}: is held-out text of {held_out[0]}, so no step shows it")
        example = data.longest[0].store.identity(0)["path"]
        raise UserError(
            f"{path}: no document of {', '.join(line.sources)} is from there, expected a file such as '{example}'"
        )


def open_trained(stage: Path) -> tuple[Data, Timeline, Tokenizer]:
    """The data of a train stage as it trains on it, its timeline and its tokenizer."""
    record = open_stage(stage)
    if record["kind"] != "train":
        raise UserError(f"{stage}: is a {record['kind']} stage, expected a train stage, such as runs/NAME/base")
    settings = TrainSettings.model_validate(record["settings"])
    tokenizer = load_tokenizer(stage / TOKENIZER)
    inputs = inputs_of(stage)
    config = starting_shape(settings, inputs, tokenizer)
    data = open_data(settings, in_role(inputs, "data"), config, tokenizer)
    return data, timeline(settings, config, data.source_size, record["seed"]), tokenizer
