"""The token store: ids, document ends, columns and identities in flat files, read through memory maps.

Everything that trains or evaluates reads this one form: pretraining text, conversations (a mask column), pairs
(adjacent documents of a group), teacher caches (columns in a directory of their own, an overlay, so that adding one
never rewrites ids). A store says which tokenizer made it and refuses another; an overlay says which store it belongs
to and refuses another.

    ids.bin            u16 while the vocabulary has at most 65,536 ids, else u32; all files are little-endian
    ends.bin           u64 per document: the position after its last id
    bytes.bin          u64 per document: UTF-8 bytes that its predicted tokens spell
    NAME.bin           a column, per token or per document
    documents.parquet  where each document came from
    manifest.json      written last; without it there is no store

Rejected: one file a document (a file system is no index), npy headers (they cannot be appended to), Arrow files for ids
(a random gather through them costs several times a plain memory map), and a separate format for each objective.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.core.artifact import digest_json
from ingot.core.errors import UserError
from ingot.store.block_file import BLOCK, BlockFile

STORE, OVERLAY, VERSION = "ingot-store", "ingot-overlay", 2
MANIFEST = "manifest.json"
DOCUMENTS = "documents.parquet"
IDENTITY_ROWS = 16_384
"""Rows of a row group of `documents.parquet`: fixed, so that a document's row group follows from its number."""


def id_dtype(vocab: int) -> str:
    """The smallest unsigned type for ids of a vocabulary: 65,536 ids still fit 16 bits."""
    assert 0 < vocab <= 2**32
    return "<u2" if vocab <= 2**16 else "<u4"


@dataclass(frozen=True)
class ColumnSpec:
    """A column: what it belongs to, its little-endian numpy type, and how many values a row has."""

    per: Literal["token", "document"]
    dtype: str
    width: int = 1


class Column:
    """One value (or `width` values) per token or per document, on disk.

    Legend: N rows (tokens or documents), W width. Values keep their stored type; shapes drop W where it is 1.
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
            UserError: a block that was read for the first time is damaged.
        """
        assert index.size == 0 or index.min() >= 0, "a negative position would wrap around"
        if not self.file.verified:
            first = index * self._row_bytes
            self.file.verify_blocks(first // BLOCK)
            if BLOCK % self._row_bytes:  # a row may lie across two blocks
                self.file.verify_blocks((first + self._row_bytes - 1) // BLOCK)
        return self._rows[index]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 as a read-only view. Raises UserError like `gather`."""
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
        """Adjacent documents that belong together: 1, or 2 for pairs."""
        self.content: str = manifest["content"]
        """What the documents are: text, chat, pairs (chosen, rejected, chosen ...) or prompts."""
        columns = _open_columns(path, manifest)
        self.ids: Column = columns.pop("ids")
        self._ends: Column = columns.pop("ends")
        self.columns: dict[str, Column] = columns
        """Every other column by name, `bytes` and those of overlays included."""
        self._identities = BlockFile(path / DOCUMENTS, manifest["files"][DOCUMENTS])
        self._row_group: tuple[int, list[dict[str, Any]]] = (-1, [])

    @classmethod
    def open(cls, path: Path, *, tokenizer: str | None = None, overlays: Sequence[Path] = ()) -> "Store":
        """Open a store, checking sizes now and contents as they are read.

        Args:
            path: the store's directory.
            tokenizer: fingerprint of the tokenizer that its ids will be used with.
            overlays: directories with more columns of this store.

        Raises:
            UserError: no store, another tokenizer, a file cut short, or an overlay of another store.
        """
        store = cls(path, _read_manifest(path, STORE))
        if tokenizer is not None and tokenizer != store.tokenizer:
            raise UserError(
                f"{path}: made with tokenizer {store.tokenizer}, but opened with tokenizer {tokenizer}; "
                "use the tokenizer it was made with or encode the corpus again"
            )
        for overlay in overlays:
            store.add_overlay(overlay)
        return store

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the manifest, and so of every byte of the store."""
        return digest_json(self.manifest)

    @cached_property
    def ends(self) -> np.ndarray:
        """Document ends [documents] (u64), all verified, still on disk."""
        return self._ends.read(0, self.documents)

    def document_of(self, token: int | np.ndarray) -> Any:
        """The document (a number, or an array of them) that holds each token position."""
        return np.searchsorted(self.ends, np.asarray(token, dtype=np.uint64), side="right")

    def span(self, document: int) -> tuple[int, int]:
        """First and past-the-last token position of a document."""
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def identity(self, document: int) -> dict[str, Any]:
        """Where a document came from: source, path, offset, bytes, group, cluster; of pairs and prompts also extra."""
        if not 0 <= document < self.documents:
            raise UserError(f"{self.path}: no document {document:,}; it has {self.documents:,}, numbered from 0")
        number, row = divmod(document, IDENTITY_ROWS)
        if self._row_group[0] != number:
            self._row_group = (number, self._table.read_row_group(number).to_pylist())
        return self._row_group[1][row]

    def extra(self, documents: np.ndarray) -> np.ndarray:
        """Further fields of the rows that prompts or pairs came from: JSON objects or None, an array of objects."""
        found = np.empty(len(documents), object)
        found[:] = self._extra.take(documents).to_pylist()
        return found

    @cached_property
    def _extra(self) -> Any:
        return self._table.read(columns=["extra"])["extra"]

    @cached_property
    def _table(self) -> Any:
        """`documents.parquet`, verified. Pretraining never asks for it, so it does not read pyarrow (24 MB) either."""
        from pyarrow.parquet import ParquetFile

        self._identities.verify()
        return ParquetFile(self._identities.path)

    def paths(self) -> list[str]:
        """Where each document is from, in order."""
        return self._table.read(columns=["path"])["path"].to_pylist()

    def find(self, path: str) -> list[int]:
        """Documents from a path, or from one that ends in it."""
        return [n for n, name in enumerate(self.paths()) if name == path or name.endswith(f"/{path}")]

    def verify(self) -> None:
        """Check every byte of every file now. Raises UserError at the first damaged block."""
        for file in (self.ids.file, self._ends.file, self._identities, *(c.file for c in self.columns.values())):
            file.verify()

    def add_overlay(self, path: Path) -> None:
        """Add the columns in a directory. Raises UserError where they are another store's, or are here already."""
        manifest = _read_manifest(path, OVERLAY)
        if manifest["base"] != self.fingerprint:
            raise UserError(
                f"{path}: columns of the store {manifest['base']}, but {self.path} is {self.fingerprint}; "
                "run the stage that wrote them again on this store"
            )
        for name, column in _open_columns(path, manifest).items():
            if name in self.columns:
                raise UserError(f"{path}: column '{name}' exists already in {self.path}; name one of the two otherwise")
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
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{file}: missing: no {format}, or never finished; run the stage that writes it") from None
    except ValueError as error:
        raise UserError(f"{file}: not a manifest ({error}); delete that directory and run again") from None
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != (format, VERSION):
        raise UserError(f"{file}: found {found[0]} {found[1]}, expected {format} {VERSION}; run its stage again")
    return manifest
