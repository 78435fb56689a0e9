"""Encodes a corpus into a train and a val store (stage kind `tokens`).

    text      ids and `eot`, if the vocabulary has one; all ids are targets
    chat      the rendered conversation; `mask` is 1 for targets
    pairs     two adjacent documents (a group of 2), chosen first: the prompt with each answer; `mask` is 1 on the
              answer and its end of turn
    prompts   the prompt with the header of the answer; `mask` is 0

Extra fields of pairs and prompts are stored with the document's identity (`extra`). The stores depend on the documents
and their order, and not on the number of threads: threads encode one slice of documents together before it is written.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus.documents import read_documents
from ingot.corpus.readers.row_formats import Format, exclude_from_loss
from ingot.store.writer import EXTRA, IDENTITY, ColumnSpec, StoreWriter
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import check_turn_end, length_to_last_target, parse_conversation, render_batch, require_chat
from ingot.tokenizer.train import check_lossless

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
MASK = ColumnSpec("token", "u1")
SLICE_BYTES = 8 << 20
"""Maximum size of a slice, the documents that are encoded at once; a longer document is a slice of its own."""


Encoded = tuple[np.ndarray, np.ndarray | None, int]
"""(ids, mask or None if all ids are targets, number of UTF-8 bytes of the targets)."""


def build_tokens(
    corpus_dir: Path,
    tokenizer: Tokenizer,
    format: Format,
    out: Path,
    workers: int | None,
    display: Display,
    log: EventLog,
) -> dict[str, Any]:
    """Write the stores `out/train` and `out/val`.

    Args:
        corpus_dir: directory of a corpus stage.
        tokenizer: the tokenizer.
        format: the format of the corpus.
        out: directory of the two stores.
        workers: encoding threads; None: all usable cores.
        display: shows progress.
        log: receives one event per split.

    Returns:
        `{train,val}_tokens`, `{train,val}_documents` and `{train,val}_bytes` (UTF-8 bytes of targets). For pairs also
        `{train,val}_pairs`. For chat and pairs also `{train,val}_targets` and `trained_fraction` (targets per token,
        train split). Except for prompts also `bytes_per_token` (per target, train split). With an unknown token also
        `{train,val}_unknown_fraction` (fraction of tokens).

    Raises:
        UserError: no train documents, text that the tokenizer cannot encode, a malformed conversation, or a chat
            template that does not end answers.
    """
    masked = format != "text"
    if masked:
        require_chat(tokenizer)
        check_turn_end(tokenizer)
    threads = workers or len(os.sched_getaffinity(0))
    result: dict[str, Any] = {}
    for split in SPLITS:
        with (
            display.bar(f"encoding {split}", unit="bytes") as bar,
            StoreWriter(
                out / split,
                tokenizer=tokenizer.fingerprint,
                vocab=tokenizer.vocab,
                columns={"mask": MASK} if masked else {},
                group=GROUP[format],
                content=format,
            ) as writer,
        ):
            targets = unknown = 0
            for batch, size in _slices(corpus_dir, split):
                encoded = _encode(batch, tokenizer, format, threads)
                targets += _append(writer, encoded, batch)
                unknown += sum(int(np.count_nonzero(ids == tokenizer.unknown)) for ids, _, _ in encoded)
                bar.advance(size, tokens=f"{writer.tokens:,}")
            if split == "train" and writer.tokens == 0:
                raise UserError(f"{corpus_dir}: the train split contains no text; check the corpus stage's report")
        counts = {"tokens": writer.tokens, "documents": writer.documents, "bytes": writer.bytes}
        counts |= {"pairs": writer.documents // 2} if format == "pairs" else {}
        counts |= {"targets": targets} if format in ("chat", "pairs") else {}
        log.write("encoded", split=split, **counts)
        result |= {f"{split}_{name}": count for name, count in counts.items()}
        if tokenizer.unknown is not None:
            result[f"{split}_unknown_fraction"] = unknown / max(1, counts["tokens"])
    if "train_targets" in result:
        result["trained_fraction"] = result["train_targets"] / result["train_tokens"]
    if format != "prompts":
        result["bytes_per_token"] = result["train_bytes"] / result.get("train_targets", result["train_tokens"])
    return result


def _text(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    end = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype=np.uint32)
    encoded = tokenizer.encode_batch(texts, threads)
    sizes = [check_lossless(tokenizer, text, ids) for text, ids in zip(texts, encoded, strict=True)]
    return [(np.concatenate((ids, end)), None, size) for ids, size in zip(encoded, sizes, strict=True)]


def _chat(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    return [*render_batch([parse_conversation(text) for text in texts], tokenizer, threads)]


def _pairs(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    """Two documents for each text, chosen first."""
    pairs = [json.loads(text) for text in texts]
    conversations = [[*exclude_from_loss(p["prompt"]), *p[side]] for p in pairs for side in ("chosen", "rejected")]
    rendered = render_batch(conversations, tokenizer, threads)
    ends = [length_to_last_target(mask) for _, mask, _ in rendered]
    return [(ids[:end], mask[:end], size) for (ids, mask, size), end in zip(rendered, ends, strict=True)]


def _prompts(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    return [*render_batch([parse_conversation(t) for t in texts], tokenizer, threads, generation_prompt=True)]


_ENCODERS: dict[Format, Callable[[list[str], Tokenizer, int], list[Encoded]]] = {
    "text": _text,
    "chat": _chat,
    "pairs": _pairs,
    "prompts": _prompts,
}
GROUP: dict[Format, int] = {"text": 1, "chat": 1, "pairs": 2, "prompts": 1}
"""Number of documents in the store for one document of the corpus."""


def _append(writer: StoreWriter, encoded: list[Encoded], batch: pa.RecordBatch) -> int:
    """Append encoded documents. Returns the number of targets in the mask, 0 without a mask."""
    ids, masks, sizes = zip(*encoded, strict=True)
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    columns = {"mask": np.concatenate(masks)} if "mask" in writer.columns else {}
    if writer.group > 1:
        batch = batch.take(pa.array(np.repeat(np.arange(batch.num_rows), writer.group)))
    writer.append(np.concatenate(ids), lengths, np.array(sizes, dtype=np.int64), batch, **columns)
    return int(columns["mask"].sum()) if columns else 0


def _encode(batch: pa.RecordBatch, tokenizer: Tokenizer, format: Format, threads: int) -> list[Encoded]:
    """Encode the documents of a batch. A UserError names the document."""
    texts: list[str] = batch.column("text").to_pylist()
    encode = _ENCODERS[format]
    try:
        return encode(texts, tokenizer, threads)
    except UserError:
        for row, text in enumerate(texts):
            try:
                encode([text], tokenizer, threads)
            except UserError as error:
                path, offset = batch.column("path")[row].as_py(), batch.column("offset")[row].as_py()
                raise UserError(f"{path}, document at {offset:,}: {error}") from None
        raise


def _slices(corpus_dir: Path, split: Literal["train", "val"]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield (slice, size in bytes) of a split's documents; a slice has at most `SLICE_BYTES`, or one document."""
    for batch in read_documents(corpus_dir, split, ["text", *IDENTITY.names, EXTRA.name]):
        start = total = 0
        for row, size in enumerate(batch.column("bytes").to_pylist()):
            if total and total + size > SLICE_BYTES:
                yield batch.slice(start, row - start), total
                start, total = row, 0
            total += size
        yield batch.slice(start), total
