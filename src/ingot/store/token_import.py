"""Reads token files of other tools into a train and a val store (stage kind `token-files`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingot.core.events import Display, EventLog
from ingot.store.encode import SPLITS
from ingot.store.token_files import CHUNK, Tokens, check_ids, read_tokens
from ingot.store.token_formats import TokenFormat
from ingot.store.writer import IDENTITY, StoreWriter
from ingot.tokenizer.base import Tokenizer


def import_tokens(
    files: Mapping[str, Sequence[Path]],
    format: TokenFormat,
    tokenizer: Tokenizer,
    out: Path,
    display: Display,
    log: EventLog,
) -> dict[str, Any]:
    """Write the stores `out/train` and `out/val`.

    Args:
        files: split -> its files, in order; none for an empty store.
        format: their format.
        tokenizer: the tokenizer that made them.
        out: directory of the two stores.
        display: shows progress.
        log: receives one event per split.

    Returns:
        `{train,val}_tokens`, `{train,val}_documents`, `{train,val}_bytes` (UTF-8 bytes of the text that ids stand for)
        and `bytes_per_token` (train split). With an unknown token also `{train,val}_unknown_fraction`.

    Raises:
        UserError: as `read_tokens`, or an id outside the vocabulary.
    """
    result: dict[str, Any] = {}
    digests = (tokenizer.vocabulary_digest, tokenizer.fingerprint)
    for split in SPLITS:
        opened = [(file, read_tokens(file, format, tokenizer.eot, *digests)) for file in files[split]]
        for file, tokens in opened:
            check_ids(file, tokens, tokenizer.vocab)
            _notify_start(file, tokens, tokenizer, display)
        unknown, fingerprint = 0, tokenizer.fingerprint
        with (
            display.bar(f"reading {split}", sum(len(t.ids) for _, t in opened), "tokens") as bar,
            StoreWriter(out / split, tokenizer=fingerprint, vocab=tokenizer.vocab) as writer,
        ):
            for file, tokens in opened:
                for first, last in _batches(tokens.ends):
                    begin = int(tokens.ends[first - 1]) if first else 0
                    ids = tokens.ids[begin : int(tokens.ends[last - 1])]
                    ends = tokens.ends[first:last].astype(np.int64) - begin
                    starts = np.concatenate(([0], ends[:-1]))
                    sizes = np.concatenate(([0], np.cumsum(tokenizer.lengths[ids])))
                    text_bytes = sizes[ends] - sizes[starts]
                    unknown += 0 if tokenizer.unknown is None else int(np.count_nonzero(ids == tokenizer.unknown))
                    identity = _identity(file, begin + starts, text_bytes, writer.documents)
                    writer.append(ids, ends - starts, text_bytes, identity)
                    bar.advance(len(ids))
        counts = {"tokens": writer.tokens, "documents": writer.documents, "bytes": writer.bytes}
        log.write("encoded", split=split, **counts)
        result |= {f"{split}_{name}": count for name, count in counts.items()}
        if tokenizer.unknown is not None:
            result[f"{split}_unknown_fraction"] = unknown / max(1, writer.tokens)
    return {**result, "bytes_per_token": result["train_bytes"] / result["train_tokens"]}


def _batches(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of documents with about `CHUNK` ids together."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, begin + CHUNK, side="right")))
        yield first, last
        first = last


def _identity(file: Path, offsets: np.ndarray, sizes: np.ndarray, first: int) -> pa.RecordBatch:
    """The origin of documents: their file, and the position of their first id in it."""
    count = len(offsets)
    columns = {
        "source": [file.name] * count,
        "path": [str(file)] * count,
        "offset": offsets,
        "bytes": sizes,
        "group": [file.name] * count,
        "cluster": np.arange(first, first + count, dtype=np.uint64),
    }
    return pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in columns.items()}, schema=IDENTITY)


def _notify_start(file: Path, tokens: Tokens, tokenizer: Tokenizer, display: Display) -> None:
    """Name a file whose documents do not begin as the texts of this tokenizer do."""
    start = tokenizer.document_start
    if start and tokens.ids[: len(start)].tolist() != start:
        display.notify(
            f"{file}: its first document does not begin with {tokenizer.decode(start)!r}, with which generation and "
            "tasks begin a text"
        )
