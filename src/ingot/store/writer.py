"""Writes token stores as a stream: each file atomically, the manifest last.

Memory holds one block per file and one row group of identities. The files depend on the documents and their order, and
not on their batches.
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
"""Columns of `documents.parquet`, copied from the corpus; `bytes` is the size of the text there."""
EXTRA = pa.field("extra", pa.string())
"""An additional column for pairs and prompts: the extra fields of their row as a JSON object, or null."""


class _ColumnFiles:
    """The open files of a store, which `publish` renames into place together."""

    def __init__(self, path: Path, specs: Mapping[str, ColumnSpec]):
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST).unlink(missing_ok=True)  # it becomes invalid when the files change
        self.path, self.specs = path, dict(specs)
        self.stack = ExitStack()
        self._files = {f"{name}.bin": self.open(f"{name}.bin") for name in specs}

    def open(self, name: str) -> BlockWriter:
        return BlockWriter(self.stack.enter_context(atomic_open(self.path / name)))

    def write(self, name: str, values: np.ndarray) -> int:
        """Append rows [n] (+ width). Returns n."""
        spec = self.specs[name]
        assert values.ndim == (1 if spec.width == 1 else 2), f"column {name}: shape {values.shape}"
        assert spec.width == 1 or values.shape[1] == spec.width, f"column {name}: shape {values.shape}"
        self._files[f"{name}.bin"].write(np.ascontiguousarray(values, dtype=np.dtype(spec.dtype)))
        return len(values)

    def publish(self, manifest: dict[str, Any], **other_files: BlockWriter) -> None:
        """Rename the files into place, then write the manifest."""
        columns = {name: asdict(spec) for name, spec in self.specs.items()}
        files = {name: file.finish() for name, file in {**self._files, **other_files}.items()}
        self.stack.close()
        atomic_json(self.path / MANIFEST, {**manifest, "columns": columns, "files": files})

    def abandon(self, error: BaseException) -> None:
        """Delete the files."""
        self.stack.__exit__(type(error), error, error.__traceback__)


class StoreWriter:
    """Context manager that appends documents to a new store and publishes it unless an exception occurs.

    Args:
        path: directory of the store.
        tokenizer: fingerprint of the tokenizer.
        vocab: size of its vocabulary, which determines the type of the ids.
        columns: columns besides `ids`, `ends` and `bytes`.
        group: number of adjacent documents in a group.
        content: format of the documents.
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
        standard = {
            "ids": ColumnSpec("token", id_dtype(vocab)),
            "ends": ColumnSpec("document", "<u8"),
            "bytes": ColumnSpec("document", "<u8"),
        }
        extra = dict(columns or {})
        assert not standard.keys() & extra.keys(), "ids, ends and bytes are standard columns"
        assert all(name.isidentifier() for name in extra), "a column's name is its file's name"
        self.tokenizer, self.vocab, self.group, self.content = tokenizer, vocab, group, content
        self.tokens = self.documents = self.bytes = 0
        self.columns = extra
        self._identity = IDENTITY.append(EXTRA) if content in ("pairs", "prompts") else IDENTITY
        self._columns = _ColumnFiles(path, {**standard, **extra})
        self._identity_file = self._columns.open(DOCUMENTS)
        self._identity_writer = self._columns.stack.enter_context(  # the stack closes it before its file
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
        """Append D documents with n tokens in total.

        Args:
            ids: concatenated ids of the documents [n].
            lengths: number of ids of each document [D].
            text_bytes: number of UTF-8 bytes of each document's targets [D].
            identity: D rows with at least the columns of `IDENTITY`, for pairs and prompts also `EXTRA`.
            columns: rows of each additional column: [n] or [D] (+ width).
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
        """Write row groups of exactly `IDENTITY_ROWS`, so that the file does not depend on the batches."""
        buffered = sum(batch.num_rows for batch in self._identities)
        if buffered == 0 or (only_full and buffered < IDENTITY_ROWS):
            return
        table = pa.Table.from_batches(self._identities, self._identity)
        start = 0
        while len(table) - start >= IDENTITY_ROWS or (not only_full and start < len(table)):
            rows = table.slice(start, IDENTITY_ROWS).combine_chunks()
            self._identity_writer.write_table(rows, row_group_size=IDENTITY_ROWS)
            start += IDENTITY_ROWS
        self._identities = table.slice(start).combine_chunks().to_batches() if start < len(table) else []
