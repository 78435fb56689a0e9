"""What a corpus stage leaves: Arrow documents in `documents-00000.parquet` ... and the way to read them back.

Every document carries where it came from (source, path, offset, group), what it equals (cluster) and which split it
is in, so that a token can be traced to its file and a split can be checked. Parts are cut by counting rows and bytes,
never by the batches that arrive: the same documents give the same bytes for any number of workers.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_open
from ingot.core.errors import UserError

Split = Literal["train", "val"]

SCHEMA = pa.schema(
    {
        "text": pa.string(),  # chat, prompts: a JSON list of {role, content}; pairs: {prompt, chosen, rejected} of them
        "source": pa.string(),  # as the recipe names it
        "path": pa.string(),  # the file, as found from the source
        "offset": pa.int64(),  # byte of the JSONL line in its file; 0 for a file; a count for generated documents
        "bytes": pa.int64(),  # UTF-8 length of `text`
        "group": pa.string(),  # the file relative to its source's root
        "cluster": pa.uint64(),  # hash of the text (of pairs: the prompt), white space normalised; never split
        "split": pa.string(),  # train | val
        "extra": pa.string(),  # pairs, prompts: the row's other fields as a JSON object, or null
    }
)

_ROWS, _GROUP_BYTES, _PART_BYTES = 4096, 16 << 20, 128 << 20


def messages_of(document: Any) -> list[dict[str, Any]]:
    """All messages of a parsed document: those of a conversation, or of a pair's prompt and both its sides."""
    return document if isinstance(document, list) else [m for part in document.values() for m in part]


class DocumentWriter:
    """Collects tables of `SCHEMA` and writes them as parts of about 128 MB, each atomically."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._waiting: list[pa.Table] = []
        self._groups: list[pa.Table] = []
        self._rows = self._bytes = self._part_bytes = 0
        self._parts = 0

    def write(self, table: pa.Table) -> None:
        """Take documents; whole row groups are set aside, whole parts are written."""
        while table.num_rows:
            taken = self._room(table)
            head = table.slice(0, taken)
            self._waiting.append(head)
            self._rows += taken
            self._bytes += pc.sum(head["bytes"]).as_py() or 0
            if self._rows >= _ROWS or self._bytes >= _GROUP_BYTES:
                self._end_group()
            table = table.slice(taken)

    def flush(self) -> int:
        """Write what is left as a part of its own. Returns the number of parts so far."""
        self._end_group()
        self._end_part()
        return self._parts

    def _room(self, table: pa.Table) -> int:
        """How many rows complete the row group at most: up to the first that fills it, that row included."""
        reached = np.cumsum(table["bytes"].to_numpy()) + self._bytes
        full = int(np.searchsorted(reached, _GROUP_BYTES)) + 1
        return min(full, _ROWS - self._rows, table.num_rows)

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
        names: Any = ["source", "path", "group", "split"]  # pyarrow takes names here, its annotation only a bool
        with (
            atomic_open(path) as file,
            pq.ParquetWriter(file, self._groups[0].schema, compression="zstd", use_dictionary=names) as writer,
        ):
            for group in self._groups:
                writer.write_table(group)
        self._groups, self._part_bytes = [], 0
        self._parts += 1


def document_parts(stage_dir: Path) -> list[Path]:
    """The parts in order."""
    return sorted(stage_dir.glob("documents-[0-9][0-9][0-9][0-9][0-9].parquet"))


def read_documents(
    stage_dir: Path, split: Split | None = None, columns: list[str] | None = None, *, parts: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Documents of a corpus stage, in order.

    Args:
        stage_dir: the stage's directory.
        split: only `train` or only `val`; both when None.
        columns: names of `SCHEMA` to read; all when None.
        parts: how many of the parts; all when None.

    Raises:
        UserError: the directory holds no documents.
    """
    files = document_parts(stage_dir)[:parts]
    if not files:
        raise UserError(f"{stage_dir}: no documents-*.parquet, expected a finished corpus stage; run that stage first")
    wanted = columns or SCHEMA.names
    read = wanted if split is None else [*dict.fromkeys([*wanted, "split"])]
    for part in files:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=1024, columns=read):
                if split is not None:
                    batch = batch.filter(pc.equal(batch["split"], split))
                if batch.num_rows:
                    yield batch.select(wanted)


def iter_texts(stage_dir: Path, split: Split | None = None) -> Iterator[str]:
    """The texts of a corpus stage, in order (for format chat: JSON arrays of messages)."""
    for batch in read_documents(stage_dir, split, ["text"]):
        yield from batch["text"].to_pylist()
