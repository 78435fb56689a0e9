"""A corpus encoded once: documents in, a train store and a val store out (kind `tokens`).

    text      ids and the end-of-text id, where the vocabulary has one; every id is learned
    chat      the rendered conversation; `mask` is 1 on what is learned
    pairs     two adjacent documents (a group of 2), chosen first: the prompt with each answer; `mask` is 1 on the
              answer and its end
    prompts   the prompt up to where the answer begins; `mask` is 0

Further fields of pairs and prompts stay with a document's identity (`extra`). What goes into the stores follows from
the documents and their order: threads share the work of one slice of documents and are joined before it is written, so
their number leaves no trace.
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
from ingot.corpus.readers.row_formats import Format, unlearned
from ingot.store.writer import EXTRA, IDENTITY, ColumnSpec, StoreWriter
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import check_end, parse_conversation, render_batch, require_chat, to_the_end
from ingot.tokenizer.train import check_lossless

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
MASK = ColumnSpec("token", "u1")
SLICE_BYTES = 8 << 20
"""Text that is encoded at once; a single longer document is encoded alone."""


Encoded = tuple[np.ndarray, np.ndarray | None, int]
"""Ids, mask (None: every id is learned), and the UTF-8 bytes of what is learned."""


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
        tokenizer: what encodes it.
        format: what the corpus's `text` holds.
        out: directory of the two stores.
        workers: encoding threads; None: all usable cores.
        display, log: where progress goes.

    Returns:
        `{train,val}_tokens`, `{train,val}_documents`, `{train,val}_bytes` (of what is learned), `{train,val}_pairs` of
        pairs, and unless all or nothing is learned `{train,val}_targets` and `trained_share` (of the train split's
        tokens); `bytes_per_token` of predicted tokens, train split, where there are any; `{train,val}_unknown_share` of
        the tokens, where the vocabulary has an unknown one.

    Raises:
        UserError: no train documents, text that the tokenizer cannot spell, a malformed conversation, a chat
            template that does not end answers.
    """
    masked = format != "text"
    if masked:
        require_chat(tokenizer)
        check_end(tokenizer)
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
                raise UserError(f"{corpus_dir}: no text in the train split, so nothing to encode; check its report")
        counts = {"tokens": writer.tokens, "documents": writer.documents, "bytes": writer.bytes}
        counts |= {"pairs": writer.documents // 2} if format == "pairs" else {}
        counts |= {"targets": targets} if format in ("chat", "pairs") else {}
        log.write("encoded", split=split, **counts)
        result |= {f"{split}_{name}": count for name, count in counts.items()}
        if tokenizer.unknown is not None:
            result[f"{split}_unknown_share"] = unknown / max(1, counts["tokens"])
    if "train_targets" in result:
        result["trained_share"] = result["train_targets"] / result["train_tokens"]
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
    """Two for each text."""
    pairs = [json.loads(text) for text in texts]
    conversations = [[*unlearned(p["prompt"]), *p[side]] for p in pairs for side in ("chosen", "rejected")]
    rendered = render_batch(conversations, tokenizer, threads)
    ends = [to_the_end(mask) for _, mask, _ in rendered]
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
"""Documents of a store that one document of a corpus becomes."""


def _append(writer: StoreWriter, encoded: list[Encoded], batch: pa.RecordBatch) -> int:
    """Returns the number of targets, where some ids are none."""
    ids, masks, sizes = zip(*encoded, strict=True)
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    columns = {"mask": np.concatenate(masks)} if "mask" in writer.columns else {}
    if writer.group > 1:
        batch = batch.take(pa.array(np.repeat(np.arange(batch.num_rows), writer.group)))
    writer.append(np.concatenate(ids), lengths, np.array(sizes, dtype=np.int64), batch, **columns)
    return int(columns["mask"].sum()) if columns else 0


def _encode(batch: pa.RecordBatch, tokenizer: Tokenizer, format: Format, threads: int) -> list[Encoded]:
    """The documents of a batch encoded; an error of one says which."""
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
    """Documents of a split in order, cut so that a slice has at most `SLICE_BYTES` or one document; with its bytes."""
    for batch in read_documents(corpus_dir, split, ["text", *IDENTITY.names, EXTRA.name]):
        start = total = 0
        for row, size in enumerate(batch.column("bytes").to_pylist()):
            if total and total + size > SLICE_BYTES:
                yield batch.slice(start, row - start), total
                start, total = row, 0
            total += size
        yield batch.slice(start), total
