"""Reads token stores: ids, document ends, columns and document identities in flat files, through memory maps.

All training and evaluation data have this format: pretraining text, conversations (with a mask column), pairs (groups
of adjacent documents) and teacher caches. The latter are overlays: columns in a directory of their own, so that adding
them does not rewrite the ids. A store records the fingerprint of its tokenizer, an overlay that of its store; opening
either with another one is an error.

    ids.bin            u16 for at most 65,536 ids, else u32; all files are little-endian
    ends.bin           u64 per document: the position after its last id
    bytes.bin          u64 per document: number of UTF-8 bytes of its targets
    NAME.bin           a column, per token or per document
    documents.parquet  the origin of each document
    manifest.json      written last; a directory without it is not a store
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.core.artifact import digest_json, regular
from ingot.core.errors import UserError
from ingot.store.block_file import BLOCK, BlockFile

STORE, OVERLAY, VERSION = "ingot-store", "ingot-overlay", 2
MANIFEST = "manifest.json"
DOCUMENTS = "documents.parquet"
ANSWERS = "chosen", "rejected"
"""The documents of a pair, in their order."""
IDENTITY_ROWS = 16_384
"""Rows per row group of `documents.parquet`, fixed so that a document's row group follows from its number."""


def id_dtype(vocab: int) -> str:
    """The smallest unsigned numpy type for the ids of a vocabulary."""
    assert 0 < vocab <= 2**32
    return "<u2" if vocab <= 2**16 else "<u4"


@dataclass(frozen=True)
class ColumnSpec:
    """The specification of a column."""

    per: Literal["token", "document"]
    """The unit of a row."""
    dtype: str
    """Little-endian numpy type, such as `<f4`."""
    width: int = 1
    """Number of values per row."""


class Column:
    """A column on disk: `width` values per token or per document, in their stored type.

    Shapes: N rows (tokens or documents), W width; W is omitted if it is 1.
    """

    def __init__(self, file: BlockFile, spec: Mapping[str, Any]):
        self.file, self.per, self.width = file, spec["per"], spec["width"]
        self.dtype = np.dtype(spec["dtype"])
        values = file.data.view(self.dtype)
        self._rows = values if self.width == 1 else values.reshape(-1, self.width)
        self._row_bytes = self.dtype.itemsize * self.width

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, index: np.ndarray) -> np.ndarray:
        """Rows at `index` (int64, any shape, 0 <= index < N), as a new array of shape index.shape (+ W).

        Raises:
            UserError: a block is damaged.
        """
        assert index.size == 0 or index.min() >= 0, "a negative index would wrap around"
        if not self.file.verified:
            first = index * self._row_bytes
            self.file.verify_blocks(first // BLOCK)
            if BLOCK % self._row_bytes:  # a row may span two blocks
                self.file.verify_blocks((first + self._row_bytes - 1) // BLOCK)
        return self._rows[index]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (exclusive) as a read-only view. Raises UserError like `gather`."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        self.file.verify_bytes(start * self._row_bytes, stop * self._row_bytes)
        return self._rows[start:stop]


class Store:
    """An open store. Use `Store.open`."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self.manifest = path, manifest
        self.tokenizer: str = manifest["tokenizer"]
        self.vocab: int = manifest["vocab"]
        self.tokens: int = manifest["tokens"]
        self.documents: int = manifest["documents"]
        self.bytes: int = manifest["bytes"]
        self.group: int = manifest["group"]
        """Number of adjacent documents in a group: 2 for pairs, else 1."""
        self.content: str = manifest["content"]
        """Format of the documents: text, chat, pairs (`ANSWERS` of each) or prompts."""
        columns = _open_columns(path, manifest)
        self.ids: Column = columns.pop("ids")
        self._ends: Column = columns.pop("ends")
        self.columns: dict[str, Column] = columns
        """All columns except ids and ends, by name; includes `bytes` and overlays."""
        self._identities = BlockFile(path / DOCUMENTS, manifest["files"][DOCUMENTS])
        self._row_group: tuple[int, Any] = (-1, None)

    @classmethod
    def open(cls, path: Path, *, tokenizer: str | None = None, overlays: Sequence[Path] = ()) -> "Store":
        """Open a store. Sizes are verified now, contents when they are read.

        Args:
            path: the store's directory.
            tokenizer: fingerprint of the tokenizer that the store must have.
            overlays: directories with additional columns of this store.

        Raises:
            UserError: no store, another tokenizer, a truncated file, or an overlay of another store.
        """
        store = cls(path, _read_manifest(path, STORE))
        if tokenizer is not None and tokenizer != store.tokenizer:
            raise UserError(
                f"{path}: found tokenizer {store.tokenizer}, expected {tokenizer}; use the tokenizer of the store or "
                "encode the corpus again"
            )
        for overlay in overlays:
            store.add_overlay(overlay)
        return store

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the manifest, which contains the checksums of all files."""
        return digest_json(self.manifest)

    @cached_property
    def ends(self) -> np.ndarray:
        """Document ends [documents] (u64), verified and memory-mapped."""
        return self._ends.read(0, self.documents)

    def document_of(self, token: int | np.ndarray) -> Any:
        """Number of the document that contains each token position; an array for an array."""
        return np.searchsorted(self.ends, np.asarray(token, dtype=np.uint64), side="right")

    def span(self, document: int) -> tuple[int, int]:
        """(start, stop) token positions of a document."""
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def identity(self, document: int) -> dict[str, Any]:
        """The origin of a document: source, path, offset, bytes, group, cluster; for pairs and prompts also extra."""
        if not 0 <= document < self.documents:
            raise UserError(f"{self.path}: no document {document:,}; it has {self.documents:,}, numbered from 0")
        number, row = divmod(document, IDENTITY_ROWS)
        if self._row_group[0] != number:
            self._row_group = (number, self._table.read_row_group(number))
        return self._row_group[1].slice(row, 1).to_pylist()[0]

    def extra(self, documents: np.ndarray) -> np.ndarray:
        """Extra fields of the rows of prompts or pairs: an object array of JSON strings or None."""
        values = np.empty(len(documents), object)
        values[:] = self._extra.take(documents).to_pylist()
        return values

    @cached_property
    def _extra(self) -> Any:
        return self._table.read(columns=["extra"])["extra"]

    @cached_property
    def _table(self) -> Any:
        """`documents.parquet`, verified. Opened on demand, because pretraining needs neither the file nor pyarrow."""
        from pyarrow.parquet import ParquetFile

        self._identities.verify()
        return ParquetFile(self._identities.path)

    def paths(self) -> list[str]:
        """The path of each document, in order."""
        return self._table.read(columns=["path"])["path"].to_pylist()

    def find(self, path: str) -> list[int]:
        """Numbers of the documents whose path equals `path` or ends in `/path`."""
        return [n for n, name in enumerate(self.paths()) if name == path or name.endswith(f"/{path}")]

    def verify(self) -> None:
        """Verify all files completely. Raises UserError at the first damaged block."""
        for file in (self.ids.file, self._ends.file, self._identities, *(c.file for c in self.columns.values())):
            file.verify()

    def add_overlay(self, path: Path) -> None:
        """Add the columns of an overlay. Raises UserError for another store's overlay, or an existing column name."""
        manifest = _read_manifest(path, OVERLAY)
        if manifest["base"] != self.fingerprint:
            raise UserError(
                f"{path}: found columns of store {manifest['base']}, expected store {self.fingerprint} ({self.path}); "
                "run the stage that wrote them again on this store"
            )
        for name, column in _open_columns(path, manifest).items():
            if name in self.columns:
                raise UserError(f"{path}: column '{name}' already exists in {self.path}; rename one of them")
            self.columns[name] = column


def _open_columns(path: Path, manifest: Mapping[str, Any]) -> dict[str, Column]:
    columns = {}
    for name, spec in manifest["columns"].items():
        file = BlockFile(path / f"{name}.bin", manifest["files"][f"{name}.bin"])
        columns[name] = Column(file, spec)
        rows = manifest["tokens"] if spec["per"] == "token" else manifest["documents"]
        if len(columns[name]) != rows:
            raise UserError(f"{file.path}: {len(columns[name]):,} rows, expected {rows:,}; run its stage again")
    return columns


def _read_manifest(path: Path, format: str) -> dict[str, Any]:
    file = regular(path / MANIFEST)
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{file}: missing, expected a finished {format}; run the stage that writes it") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a manifest ({error}); delete that directory and run again") from None
    actual = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if actual != (format, VERSION):
        raise UserError(f"{file}: found {actual[0]} {actual[1]}, expected {format} {VERSION}; run its stage again")
    return manifest
