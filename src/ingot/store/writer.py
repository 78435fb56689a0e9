"""Writing stores: streamed, each file whole or absent, the manifest last.

Memory holds one block of each file and one row group of identities, whatever the corpus is. The bytes written depend
on the documents and their order alone, not on how they were batched.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_json, atomic_open
from ingot.store.block_file import BlockWriter
from ingot.store.reader import DOCUMENTS, IDENTITY_ROWS, MANIFEST, STORE, VERSION, ColumnSpec, id_dtype

IDENTITY = pa.schema(
    [
        ("source", pa.string()),
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("group", pa.string()),
        ("cluster", pa.uint64()),
    ]
)
"""Columns of `documents.parquet`, as the corpus writes them; `bytes` is the length of its text there."""
EXTRA = pa.field("extra", pa.string())
"""One more column of pairs and prompts: the further fields of their row as a JSON object, or null."""


class _Columns:
    """Column files being written; they appear together when the block ends well."""

    def __init__(self, path: Path, specs: Mapping[str, ColumnSpec]):
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST).unlink(missing_ok=True)  # what it describes is about to be replaced
        self.path, self.specs = path, dict(specs)
        self.stack = ExitStack()
        self._files = {f"{name}.bin": self.open(f"{name}.bin") for name in specs}

    def open(self, name: str) -> BlockWriter:
        return BlockWriter(self.stack.enter_context(atomic_open(self.path / name)))

    def write(self, name: str, values: np.ndarray) -> int:
        """Append rows; returns how many."""
        spec = self.specs[name]
        assert values.ndim == (1 if spec.width == 1 else 2), f"column {name}: shape {values.shape}"
        assert spec.width == 1 or values.shape[1] == spec.width, f"column {name}: shape {values.shape}"
        self._files[f"{name}.bin"].write(np.ascontiguousarray(values, dtype=np.dtype(spec.dtype)))
        return len(values)

    def rows(self, name: str) -> int:
        spec = self.specs[name]
        return self._files[f"{name}.bin"].bytes // (np.dtype(spec.dtype).itemsize * spec.width)

    def publish(self, manifest: dict[str, Any], **more: BlockWriter) -> None:
        """Rename the files into place, then write the manifest."""
        columns = {name: asdict(spec) for name, spec in self.specs.items()}
        files = {name: file.finish() for name, file in {**self._files, **more}.items()}
        self.stack.close()
        atomic_json(self.path / MANIFEST, {**manifest, "columns": columns, "files": files})

    def abandon(self, error: BaseException) -> None:
        """Remove what was written."""
        self.stack.__exit__(type(error), error, error.__traceback__)


class StoreWriter:
    """Streams documents into a new store; a context manager that publishes on a clean exit.

    Args:
        path: directory of the store.
        tokenizer: fingerprint of the tokenizer that makes the ids.
        vocab: its size; decides the width of ids.
        columns: columns besides `ids`, `ends` and `bytes`.
        group: how many adjacent documents belong together.
        content: format of the corpus that the documents come from.
    """

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: str,
        vocab: int,
        columns: Mapping[str, ColumnSpec] | None = None,
        group: int = 1,
        content: str = "text",
    ):
        own = {
            "ids": ColumnSpec("token", id_dtype(vocab)),
            "ends": ColumnSpec("document", "<u8"),
            "bytes": ColumnSpec("document", "<u8"),
        }
        extra = dict(columns or {})
        assert not own.keys() & extra.keys(), "ids, ends and bytes are always there"
        assert all(name.isidentifier() for name in extra), "a column's name is its file's name"
        self.tokenizer, self.vocab, self.group, self.content = tokenizer, vocab, group, content
        self.tokens = self.documents = self.bytes = 0
        self.columns = extra
        self._identity = IDENTITY.append(EXTRA) if content in ("pairs", "prompts") else IDENTITY
        self._columns = _Columns(path, {**own, **extra})
        self._identity_file = self._columns.open(DOCUMENTS)
        self._identity_writer = self._columns.stack.enter_context(  # closed before its file, also on an error
            pq.ParquetWriter(self._identity_file, self._identity, compression="zstd")
        )
        self._identities: list[pa.RecordBatch] = []

    def append(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        text_bytes: np.ndarray,
        identity: pa.RecordBatch,
        **columns: np.ndarray,
    ) -> None:
        """Append D documents of n tokens in all.

        Args:
            ids: the documents' ids one after another [n].
            lengths: ids of each document [D].
            text_bytes: UTF-8 bytes that each document's predicted tokens spell [D].
            identity: a batch of D rows with at least the columns of `IDENTITY`; of pairs and prompts, `EXTRA` too.
            columns: rows of every extra column: [n] or [D] (+ width).
        """
        assert len(ids) == lengths.sum()
        assert len(lengths) == len(text_bytes) == identity.num_rows
        assert len(ids) == 0 or int(ids.max()) < self.vocab, f"id {ids.max()} of a vocabulary of {self.vocab}"
        assert columns.keys() == self.columns.keys(), f"columns {sorted(columns)}, expected {sorted(self.columns)}"
        self._columns.write("ids", ids)
        self._columns.write("ends", self.tokens + np.cumsum(lengths, dtype=np.uint64))
        self._columns.write("bytes", text_bytes)
        for name, values in columns.items():
            expected = len(ids) if self.columns[name].per == "token" else len(lengths)
            written = self._columns.write(name, values)
            assert written == expected, f"column {name}: {written} rows, expected {expected}"
        self.tokens += len(ids)
        self.documents += len(lengths)
        self.bytes += int(text_bytes.sum())
        self._identities.append(identity.select(self._identity.names).cast(self._identity))
        self._write_identities(only_full=True)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        except BaseException as late:
            self._columns.abandon(late)
            raise
        if error is not None:
            self._columns.abandon(error)

    def _publish(self) -> None:
        assert self.documents % self.group == 0, f"{self.documents} documents do not make groups of {self.group}"
        self._write_identities(only_full=False)
        self._identity_writer.close()
        manifest = {
            "format": STORE,
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "vocab": self.vocab,
            "dtype": id_dtype(self.vocab),
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "group": self.group,
            "content": self.content,
        }
        self._columns.publish(manifest, **{DOCUMENTS: self._identity_file})

    def _write_identities(self, only_full: bool) -> None:
        """Write row groups of exactly `IDENTITY_ROWS`, so that batching leaves no trace in the file."""
        waiting = sum(batch.num_rows for batch in self._identities)
        if waiting == 0 or (only_full and waiting < IDENTITY_ROWS):
            return
        table = pa.Table.from_batches(self._identities, self._identity)
        start = 0
        while len(table) - start >= IDENTITY_ROWS or (not only_full and start < len(table)):
            rows = table.slice(start, IDENTITY_ROWS).combine_chunks()
            self._identity_writer.write_table(rows, row_group_size=IDENTITY_ROWS)
            start += IDENTITY_ROWS
        self._identities = table.slice(start).combine_chunks().to_batches() if start < len(table) else []
