"""The documents of a step's batch, and the steps of a document, for past and future steps.

Both are computed from the timeline; training records nothing for them. No torch, so that `ingot trace` is fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import UserError
from ingot.core.events import METRICS, read_events
from ingot.stages.job import TOKENIZER, in_role, inputs_of, read_record
from ingot.stages.training.data import Data, initial_config, open_data
from ingot.stages.training.phases import build_timeline
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.train.health import repair_of


@dataclass(frozen=True)
class TracedRow:
    """A row of a batch: its token ids, and the documents that they come from."""

    source: str
    row: int
    pieces: list[dict[str, Any]]
    """For each document: its identity (source, path, offset ...), `first_token` and `tokens` of the piece, its text."""
    ids: np.ndarray


def trace(stage: Path, step: int) -> Iterator[TracedRow]:
    """The rows in the batch of a step.

    Args:
        stage: directory of a train stage.
        step: 1-based; may be one that is not trained yet.

    Raises:
        UserError: the run has fewer steps.
    """
    data, timeline, tokenizer = open_training_data(stage)
    if step > timeline.steps:
        raise UserError(f"--step: found {step:,}, expected at most {timeline.steps:,}, the last step of {stage}")
    phase, source_B, row_B = timeline.at(step)
    for s, row in zip(source_B.tolist(), row_B.tolist(), strict=True):
        source = data.train[phase.context][s]
        pieces, ids = [], []
        for piece in source.plan.slices(row):
            begin, _ = source.store.span(piece.document)
            piece_ids = source.store.ids.read(piece.start, piece.stop)
            ids.append(piece_ids)
            identity = source.store.identity(piece.document)
            span = {"first_token": piece.start - begin, "tokens": piece.stop - piece.start}
            pieces.append({**identity, **span, "text": tokenizer.decode(piece_ids)})
        yield TracedRow(source.name, row, pieces, np.concatenate(ids))


def repair(stage: Path, step: int) -> str:
    """Why a step of a stage did not update the weights as planned; "" if it did, or is not made yet."""
    events = stage / METRICS
    return repair_of(step, read_events(events, "skipped"), read_events(events, "rollback"))


def documents(data: Data, timeline: Timeline, step: int) -> list[str]:
    """The documents in the batch of a step, each once, as "corpus path offset"."""
    phase, source_B, row_B = timeline.at(step)
    names: dict[str, None] = {}
    for s, row in zip(source_B.tolist(), row_B.tolist(), strict=True):
        source = data.train[phase.context][s]
        for piece in source.plan.slices(row):
            identity = source.store.identity(piece.document)
            names[f"{source.name} {identity['path']} {identity['offset']}"] = None
    return list(names)


def trace_document(stage: Path, path: str) -> Iterator[dict[str, Any]]:
    """The documents of a file that are trained on, each with the steps whose batch contains part of it.

    Args:
        stage: directory of a train stage.
        path: path of the file as recorded in the documents, or the end of it, such as a file name.

    Yields:
        {corpus, tokens, steps, identity ...} for each document.

    Raises:
        UserError: no training document is from that file, or no step trains on it.
    """
    data, timeline, _ = open_training_data(stage)
    documents, traced = 0, False
    for source in data.train_sources:
        for document in source.store.find(path):
            documents += 1
            if not (steps := steps_of(data, timeline, data.names.index(source.name), document)):
                continue
            traced, (first, last) = True, source.store.span(document)
            yield {
                "corpus": source.name,
                **source.store.identity(document),
                "tokens": last - first,
                "steps": steps,
            }
    if documents and not traced:
        raise UserError(
            f"{path}: found in no batch up to the last step, {timeline.steps:,}, of {stage}, expected a document that "
            "is trained on; name one that `ingot trace --step` shows"
        )
    if not documents:
        held_out = [source.name for source in data.held_out if source.store.find(path)]
        if held_out:
            raise UserError(f"{path}: held-out text of {held_out[0]}, which is in no batch; name a training document")
        example = data.train_sources[0].store.identity(0)["path"]
        raise UserError(
            f"{path}: no document of {', '.join(timeline.sources)} is from this file, expected one such as '{example}'"
        )


def steps_of(
    data: Data, timeline: Timeline, source: int, document: int, tokens: tuple[int, int] | None = None
) -> list[int]:
    """The steps whose batch contains part of a document, in order.

    Args:
        data, timeline: of the train stage.
        source: index in `data.names`.
        document: number in its store.
        tokens: only the steps that contain some of these tokens, [start, stop) in the store.
    """
    steps: set[int] = set()
    for context, sources in data.train.items():
        if source in sources:
            plan = sources[source].plan
            for row in plan.rows_of(document, tokens):
                steps.update(timeline.steps_of(source, context, row))
    return sorted(steps)


def open_training_data(stage: Path) -> tuple[Data, Timeline, Tokenizer]:
    """Open the data, the timeline and the tokenizer of a train stage.

    Raises:
        UserError: not a train stage.
    """
    record = read_record(stage)
    if record["kind"] != "train":
        raise UserError(f"{stage}: is a {record['kind']} stage, expected a train stage, such as runs/NAME/base")
    settings = TrainSettings.model_validate(record["settings"])
    tokenizer = load_tokenizer(stage / TOKENIZER)
    inputs = inputs_of(stage)
    config = initial_config(settings, inputs, tokenizer)
    data = open_data(settings, in_role(inputs, "data"), config, tokenizer)
    return data, build_timeline(settings, config, data.source_size, record["seed"]), tokenizer
