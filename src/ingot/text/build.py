"""A corpus encoded once: documents in, a train store and a val store out (kind `tokens`).

Text documents become their ids and the end-of-text id, where the vocabulary has one. Chat documents become rendered
conversations with a `mask` column. What goes into the stores follows from the documents and their order: threads share
the work of one slice of documents and are joined before it is written, so their number leaves no trace.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus.documents import read_documents
from ingot.text.chat import parse_conversation, render_batch, require_chat
from ingot.text.store_writer import IDENTITY, ColumnSpec, StoreWriter
from ingot.text.tokenizer import Tokenizer
from ingot.text.train_tokenizer import check_lossless

T = TypeVar("T")
SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
MASK = ColumnSpec("token", "u1")
SLICE_BYTES = 8 << 20
"""Text that is encoded at once; a single longer document is encoded alone."""


def build_tokens(
    corpus_dir: Path,
    tokenizer: Tokenizer,
    format: Literal["text", "chat"],
    out: Path,
    workers: int | None,
    display: Display,
    log: EventLog,
) -> dict[str, Any]:
    """Write the stores `out/train` and `out/val`.

    Args:
        corpus_dir: directory of a corpus stage.
        tokenizer: what encodes it.
        format: what the corpus's `text` holds.
        out: directory of the two stores.
        workers: encoding threads; None: all usable cores.
        display, log: where progress goes.

    Returns:
        `{train,val}_tokens`, `{train,val}_documents`, `{train,val}_bytes`, `bytes_per_token` (of predicted tokens,
        train split) and for chat `{train,val}_targets` and `trained_share` (of the train split's tokens).

    Raises:
        UserError: no train documents, text that the tokenizer cannot spell, a malformed conversation.
    """
    if format == "chat":
        require_chat(tokenizer)
    threads = workers or len(os.sched_getaffinity(0))
    result: dict[str, Any] = {}
    for split in SPLITS:
        columns = {"mask": MASK} if format == "chat" else {}
        with (
            display.bar(f"encoding {split}", unit="bytes") as bar,
            StoreWriter(out / split, tokenizer=tokenizer.fingerprint, vocab=tokenizer.vocab, columns=columns) as writer,
        ):
            targets = 0
            for batch, size in _slices(corpus_dir, split):
                if format == "chat":
                    targets += _append_chat(writer, tokenizer, batch, threads)
                else:
                    _append_text(writer, tokenizer, batch, threads)
                bar.advance(size, tokens=f"{writer.tokens:,}")
            if split == "train" and writer.tokens == 0:
                raise UserError(f"{corpus_dir}: no text in the train split, so nothing to encode; check its report")
        counts = {"tokens": writer.tokens, "documents": writer.documents, "bytes": writer.bytes}
        if format == "chat":
            counts["targets"] = targets
        log.write("encoded", split=split, **counts)
        result |= {f"{split}_{name}": count for name, count in counts.items()}
    predicted = result["train_targets"] if format == "chat" else result["train_tokens"]
    result["bytes_per_token"] = result["train_bytes"] / predicted
    if format == "chat":
        result["trained_share"] = predicted / result["train_tokens"]
    return result


def _append_text(writer: StoreWriter, tokenizer: Tokenizer, batch: pa.RecordBatch, threads: int) -> None:
    def encode(texts: list[str]) -> tuple[list[np.ndarray], list[int]]:
        encoded = tokenizer.encode_batch(texts, threads)
        return encoded, [check_lossless(tokenizer, text, ids) for text, ids in zip(texts, encoded, strict=True)]

    encoded, sizes = _located(batch, encode)
    if tokenizer.eot is not None:
        end = np.array([tokenizer.eot], dtype=np.uint32)
        encoded = [np.concatenate((ids, end)) for ids in encoded]
    writer.append(np.concatenate(encoded), _lengths(encoded), np.array(sizes, dtype=np.int64), batch)


def _append_chat(writer: StoreWriter, tokenizer: Tokenizer, batch: pa.RecordBatch, threads: int) -> int:
    """Returns the number of targets."""
    rendered = _located(
        batch, lambda texts: render_batch([parse_conversation(text) for text in texts], tokenizer, threads)
    )
    ids, masks, sizes = zip(*rendered, strict=True)
    mask = np.concatenate(masks)
    writer.append(np.concatenate(ids), _lengths(ids), np.array(sizes, dtype=np.int64), batch, mask=mask)
    return int(mask.sum())


def _located(batch: pa.RecordBatch, work: Callable[[list[str]], T]) -> T:
    """`work` on the texts of a batch; an error of one document says which document."""
    texts: list[str] = batch.column("text").to_pylist()
    try:
        return work(texts)
    except UserError:
        for row, text in enumerate(texts):
            try:
                work([text])
            except UserError as error:
                path, offset = batch.column("path")[row].as_py(), batch.column("offset")[row].as_py()
                raise UserError(f"{path}, document at {offset:,}: {error}") from None
        raise


def _slices(corpus_dir: Path, split: Literal["train", "val"]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Documents of a split in order, cut so that a slice has at most `SLICE_BYTES` or one document; with its bytes."""
    for batch in read_documents(corpus_dir, split, ["text", *IDENTITY.names]):
        start = total = 0
        for row, size in enumerate(batch.column("bytes").to_pylist()):
            if total and total + size > SLICE_BYTES:
                yield batch.slice(start, row - start), total
                start, total = row, 0
            total += size
        yield batch.slice(start), total


def _lengths(ids: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in ids], dtype=np.int64)
