"""Encodes a corpus into a train and a val store (stage kind `tokens`).

    text      `document_start`, ids and `eot`, if the vocabulary has them; all ids are targets
    chat      the rendered conversation; `mask` is 1 for targets
    pairs     two adjacent documents (a group of 2), chosen first: the prompt with each answer; `mask` is 1 on the
              answer and its end of turn
    prompts   the prompt with the header of the answer; `mask` is 0

A conversation that the chat template refuses is left out and listed in `quarantine.jsonl`. Extra fields of pairs and
prompts are stored with the document's identity (`extra`). The stores depend on the documents and their order, and not
on the number of threads: threads encode one slice of documents together before it is written.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.core.process import usable_cores
from ingot.corpus.documents import messages_of, read_documents
from ingot.corpus.readers.fields import Format
from ingot.corpus.readers.messages import exclude_from_loss
from ingot.store.reader import ANSWERS
from ingot.store.refused import Refused
from ingot.store.writer import EXTRA, IDENTITY, ColumnSpec, StoreWriter
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import (
    check_turn_end,
    length_to_last_target,
    parse_conversation,
    render_batch,
    require_chat,
    thought_in_prompt,
)
from ingot.tokenizer.round_trip import RoundTrip, counted_bytes
from ingot.tokenizer.template_sandbox import ConversationRefused

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
MASK = ColumnSpec("token", "u1")
SLICE_BYTES = 8 << 20
"""Maximum size of a slice, the documents that are encoded at once; a longer document is a slice of its own."""
SAMPLE_CHARACTERS = 65_536
"""Characters of each slice that are decoded again, to find text that the tokenizer changes."""


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
    totals: Mapping[str, int] | None = None,
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
        totals: split -> bytes of its documents, for the progress display.

    Returns:
        `{train,val}_tokens`, `{train,val}_documents` and `{train,val}_bytes` (UTF-8 bytes of targets). For pairs also
        `{train,val}_pairs`. For chat and pairs also `{train,val}_targets` and `trained_fraction` (targets per token,
        train split). Except for text also `{train,val}_refused` (documents that the chat template refuses). Except for
        prompts also `bytes_per_token` (per target, train split). With an unknown token also
        `{train,val}_unknown_fraction` (fraction of tokens). If decoding changes texts of a sample, `changed_fraction`
        (of these texts).

    Raises:
        UserError: no train documents, text that the tokenizer cannot encode, a malformed conversation, or a chat
            template that does not end answers or refuses all conversations.
    """
    masked = format != "text"
    if masked:
        require_chat(tokenizer)
        check_turn_end(tokenizer)
    if format in ("chat", "pairs") and (thought := thought_in_prompt(tokenizer)):
        display.notify(
            f"the chat template ends the prompt of an answer in {thought!r}, which answers without reasoning do not "
            "follow in training; a model generates after it"
        )
    threads = workers or usable_cores()
    round_trip = RoundTrip(tokenizer)
    result: dict[str, Any] = {}
    with Refused(out) as refused:
        for split in SPLITS:
            with (
                display.bar(f"encoding {split}", (totals or {}).get(split), "bytes") as bar,
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
                refused.start()
                for batch, size in _slices(corpus_dir, split):
                    encoded, batch = _encode(batch, tokenizer, format, threads, refused)
                    sample = list(_sample(batch, format))
                    round_trip.add(sample, tokenizer.encode_batch(sample, threads))
                    targets += _append(writer, encoded, batch) if encoded else 0
                    unknown += sum(int(np.count_nonzero(ids == tokenizer.unknown)) for ids, _, _ in encoded)
                    bar.advance(size, tokens=f"{writer.tokens:,}")
                if split == "train" and writer.tokens == 0 and refused.documents:
                    raise UserError(
                        f"{corpus_dir}: the chat template refuses all {refused.documents:,} documents of the train "
                        f"split; the first is {refused.first}"
                    )
                if split == "train" and writer.tokens == 0:
                    raise UserError(f"{corpus_dir}: the train split contains no text; check the corpus stage's report")
            if refused.documents:
                total = refused.documents + writer.documents // GROUP[format]
                display.notify(
                    f"the chat template refuses {refused.documents:,} of {total:,} documents of the {split} split, see "
                    f"quarantine.jsonl; the first is {refused.first}"
                )
            counts = {"tokens": writer.tokens, "documents": writer.documents, "bytes": writer.bytes}
            counts |= {"refused": refused.documents} if masked else {}
            counts |= {"pairs": writer.documents // 2} if format == "pairs" else {}
            counts |= {"targets": targets} if format in ("chat", "pairs") else {}
            log.write("encoded", split=split, **counts)
            result |= {f"{split}_{name}": count for name, count in counts.items()}
            if tokenizer.unknown is not None:
                result[f"{split}_unknown_fraction"] = unknown / max(1, counts["tokens"])
    if round_trip.changed:
        display.notify(round_trip.message)
        result["changed_fraction"] = round_trip.changed / round_trip.texts
    if format == "text" and tokenizer.eot is None and result["train_documents"] > 1:
        documents = f"{result['train_documents']:,} documents"
        display.notify(f"the tokenizer has no end of text: {documents} follow each other without a sign between them")
    if "train_targets" in result:
        result["trained_fraction"] = result["train_targets"] / result["train_tokens"]
    if format != "prompts":
        result["bytes_per_token"] = result["train_bytes"] / result.get("train_targets", result["train_tokens"])
    return result


def _text(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    start = np.array(tokenizer.document_start, dtype=np.uint32)
    end = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype=np.uint32)
    encoded = tokenizer.encode_batch(texts, threads)
    sizes = [counted_bytes(tokenizer, text, ids) for text, ids in zip(texts, encoded, strict=True)]
    return [(np.concatenate((start, ids, end)), None, size) for ids, size in zip(encoded, sizes, strict=True)]


def _chat(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    return [*render_batch([parse_conversation(text) for text in texts], tokenizer, threads)]


def _pairs(texts: list[str], tokenizer: Tokenizer, threads: int) -> list[Encoded]:
    """Two documents for each text, chosen first."""
    pairs = [json.loads(text) for text in texts]
    conversations = [[*exclude_from_loss(p["prompt"]), *p[side]] for p in pairs for side in ANSWERS]
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


def _encode(
    batch: pa.RecordBatch, tokenizer: Tokenizer, format: Format, threads: int, refused: Refused
) -> tuple[list[Encoded], pa.RecordBatch]:
    """Encode the documents of a batch, and take those out that the chat template refuses.

    Returns:
        the encoded documents, and the rows of the batch that they are.

    Raises:
        UserError: names a document that cannot be encoded.
    """
    try:
        return _ENCODERS[format](batch.column("text").to_pylist(), tokenizer, threads), batch
    except UserError as error:
        if batch.num_rows == 1 and isinstance(error, ConversationRefused):
            refused.add(batch, str(error))
            return [], batch.slice(1)
        if batch.num_rows == 1:
            path, offset = batch["path"][0].as_py(), batch["offset"][0].as_py()
            raise UserError(f"{path}, document at {offset:,}: {error}") from None
    middle = batch.num_rows // 2
    halves = [
        _encode(half, tokenizer, format, threads, refused) for half in (batch.slice(0, middle), batch.slice(middle))
    ]
    encoded, kept = zip(*halves, strict=True)
    return [*itertools.chain(*encoded)], pa.concat_batches(kept)


def _sample(batch: pa.RecordBatch, format: Format) -> Iterator[str]:
    """The first texts of a slice, or the first messages of its conversations, `SAMPLE_CHARACTERS` at most."""
    left = SAMPLE_CHARACTERS
    for text in batch.column("text"):
        document = text.as_py()
        messages = [] if format == "text" else messages_of(json.loads(document))
        for one in [document] if format == "text" else [message.get("content") or "" for message in messages]:
            yield one[:left]
            left -= len(one)
            if left <= 0:
                return


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
