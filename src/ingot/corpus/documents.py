"""The output format of a corpus stage: Parquet files `documents-00000.parquet` ..., their writer and their readers.

Each document records its origin (source, path, offset, group), the cluster of its duplicates and its split, so a token
can be traced to its file and a split can be checked. File boundaries follow from counts of rows and bytes alone, never
from the incoming batches: the same documents give the same bytes for any number of workers.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_open, damaged
from ingot.core.errors import UserError, system_error

Split = Literal["train", "val"]

SCHEMA = pa.schema(
    {
        "text": pa.string(),  # chat, prompts: a JSON list of messages; pairs: {prompt, chosen, rejected} of them
        "source": pa.string(),  # as the recipe names it
        "path": pa.string(),  # the file within the source
        "offset": pa.int64(),  # byte of the JSONL line; row number in a table; 0 for a text file
        "bytes": pa.int64(),  # UTF-8 length of `text`
        "group": pa.string(),  # the file relative to its source's root
        "cluster": pa.uint64(),  # hash of the text (pairs: of the prompt) without white space differences; never split
        "split": pa.string(),  # train | val
        "extra": pa.string(),  # chat, pairs, prompts: the row's other fields as a JSON object, or null
        "metadata": pa.string(),  # text: likewise
        "language": pa.string(),  # with the setting `languages`: its code
        "language_score": pa.float32(),  # and how sure that is, 0 to 1
    }
)

SCORE_PREFIX, PHASE = "score_", "phase"
"""Columns beside those of `SCHEMA`: `score_NAME` (float32) of stages of kind `score`, `phase` (string) of `select`."""

BATCH_ROWS = 1024
"""Most documents that are read at once."""
_GROUP_ROWS, _GROUP_BYTES, _PART_BYTES = 4096, 16 << 20, 128 << 20


def messages_of(document: Any) -> list[dict[str, Any]]:
    """All messages of a parsed document: of a conversation, or of a pair's prompt, chosen and rejected answers."""
    return document if isinstance(document, list) else [m for messages in document.values() for m in messages]


def text_fields_of(message: Mapping[str, Any]) -> list[str]:
    """The fields of a message with text: `content`, and `reasoning_content` if it has reasoning."""
    return [name for name in ("content", "reasoning_content") if name in message]


class DocumentWriter:
    """Collects tables of `SCHEMA` and writes them atomically as Parquet files (parts) of about 128 MB."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._waiting: list[pa.Table] = []
        self._groups: list[pa.Table] = []
        self._rows = self._bytes = self._part_bytes = 0
        self._parts = 0

    def write(self, table: pa.Table) -> None:
        """Append documents. Full row groups are buffered; a full part is written to disk."""
        while table.num_rows:
            rows = self._rows_for_group(table)
            head = table.slice(0, rows)
            self._waiting.append(head)
            self._rows += rows
            self._bytes += pc.sum(head["bytes"]).as_py() or 0
            if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
                self._end_group()
            table = table.slice(rows)

    def flush(self) -> int:
        """Write the buffered documents as one more part. Returns the number of parts so far."""
        self._end_group()
        self._end_part()
        return self._parts

    def _rows_for_group(self, table: pa.Table) -> int:
        """Number of leading rows of the table that go into the current row group, the row that fills it included."""
        total_bytes = np.cumsum(table["bytes"].to_numpy()) + self._bytes
        rows = int(np.searchsorted(total_bytes, _GROUP_BYTES)) + 1
        return min(rows, _GROUP_ROWS - self._rows, table.num_rows)

    def _end_group(self) -> None:
        if self._rows:
            self._groups.append(pa.concat_tables(self._waiting).combine_chunks())
            self._part_bytes += self._bytes
            self._waiting, self._rows, self._bytes = [], 0, 0
        if self._part_bytes >= _PART_BYTES:
            self._end_part()

    def _end_part(self) -> None:
        if not self._groups:
            return
        path = self._directory / f"documents-{self._parts:05d}.parquet"
        names: Any = ["source", "path", "group", "split"]  # pyarrow accepts names; its annotation says bool
        with (
            atomic_open(path) as file,
            pq.ParquetWriter(file, self._groups[0].schema, compression="zstd", use_dictionary=names) as writer,
        ):
            for group in self._groups:
                writer.write_table(group)
        self._groups, self._part_bytes = [], 0
        self._parts += 1


def split_counts(splits: np.ndarray, sizes: np.ndarray) -> dict[str, int]:
    """{train,val}_{documents,bytes} of documents, given the split and the bytes of each."""
    counts: dict[str, int] = {}
    for split in get_args(Split):
        rows = splits == split
        counts |= {f"{split}_documents": int(rows.sum()), f"{split}_bytes": int(sizes[rows].sum())}
    return counts


def document_parts(stage_dir: Path) -> list[Path]:
    """The Parquet files of a corpus stage, in order."""
    return sorted(stage_dir.glob("documents-[0-9][0-9][0-9][0-9][0-9].parquet"))


def document_count(stage_dir: Path) -> int:
    """Documents of a stage, copies of `repeat` included."""
    return sum(_opened(pq.read_metadata, path).num_rows for path in document_parts(stage_dir))


def columns_of(stage_dir: Path) -> list[str]:
    """The columns of a stage's documents: those of `SCHEMA`, scores and the phase."""
    parts = document_parts(stage_dir)
    return _opened(pq.read_schema, parts[0]).names if parts else SCHEMA.names


def _opened(read: Callable[[Path], Any], path: Path) -> Any:
    """What a function reads of a Parquet file. Raises UserError if it is damaged."""
    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        if system_error(error) is not None:
            raise
        raise damaged(path, "documents") from None


def read_documents(
    stage_dir: Path, split: Split | None = None, columns: list[str] | None = None, *, parts: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Documents of a corpus stage, in order.

    Args:
        stage_dir: the stage's directory.
        split: `train` or `val`; None reads both.
        columns: columns of the documents (`columns_of`); None reads those of `SCHEMA`.
        parts: number of files to read; None reads all.

    Raises:
        UserError: the directory contains no documents, or a damaged file.
    """
    files = document_parts(stage_dir)[:parts]
    if not files:
        raise UserError(
            f"{stage_dir}: no documents-*.parquet, expected a corpus stage that is done; run that stage first"
        )
    selected = columns or SCHEMA.names
    stored = selected if split is None else [*dict.fromkeys([*selected, "split"])]
    for path in files:
        for batch in _batches(path, stored):
            if split is not None:
                batch = batch.filter(pc.equal(batch["split"], split))
            if batch.num_rows:
                yield batch.select(selected)


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file. Raises UserError if it is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
    except (pa.ArrowException, OSError) as error:
        if system_error(error) is not None:
            raise
        raise damaged(path, "documents") from None


def iter_texts(stage_dir: Path, split: Split | None = None) -> Iterator[str]:
    """The texts of a corpus stage, in order. Documents of other formats than `text` are JSON."""
    for batch in read_documents(stage_dir, split, ["text"]):
        yield from batch["text"].to_pylist()
