"""Writes additional columns of an existing store (an overlay), in any order and resumable.

Computing teacher outputs or reference log-probabilities takes hours, in the order of a row plan and not of the store.
So files of full size are filled in place through memory maps, and a progress file records the number of finished rows.
At the end the files are copied with their checksums, and the manifest, which makes the overlay valid, is written last.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_json, atomic_open
from ingot.store.block_file import BlockWriter
from ingot.store.reader import MANIFEST, OVERLAY, VERSION, ColumnSpec, Store

_PROGRESS = "progress.json"
_CHUNK = 1 << 22
"""Bytes to fill or copy at a time."""


class ColumnFiller:
    """Fills the columns of an overlay.

    Args:
        path: directory of the overlay.
        base: the store that the columns belong to, which stays unchanged.
        columns: name -> specification. Rows that are never written are NaN in float columns per document, else 0.
    """

    def __init__(self, path: Path, base: Store, columns: Mapping[str, ColumnSpec]):
        taken = {"ids", "ends", *base.columns} & columns.keys()
        assert not taken, f"the store already has {sorted(taken)}"
        assert all(name.isidentifier() for name in columns), "a column's name is its file's name"
        self.path, self._base, self._columns = path, base, dict(columns)
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST).unlink(missing_ok=True)  # it becomes invalid when the files change
        self._identity = {"base": base.fingerprint, "columns": {n: asdict(spec) for n, spec in columns.items()}}
        self.done = self._progress()
        """The argument of the last `checkpoint` of an earlier process, or 0."""
        if not self.done:
            for name in columns:
                self._create(name)
        self._maps = {name: self._map(name) for name in columns}

    def put(self, name: str, index: np.ndarray, values: np.ndarray) -> None:
        """Write rows of a column.

        Args:
            name: the column.
            index: token or document numbers, any shape.
            values: of shape index.shape (+ width).
        """
        self._maps[name][index] = values

    def checkpoint(self, done: int) -> None:
        """Flush the rows written so far and record `done`, from which a later process resumes."""
        self._flush()
        atomic_json(self.path / _PROGRESS, {**self._identity, "done": done})

    def publish(self) -> None:
        """Complete the overlay: copy the files with checksums, write the manifest, delete the temporary files."""
        files: dict[str, Any] = {}
        self._flush()
        for name in self._columns:
            with atomic_open(self.path / f"{name}.bin") as file, self._temporary(name).open("rb") as source:
                writer = BlockWriter(file)
                while data := source.read(_CHUNK):
                    writer.write(data)
                files[f"{name}.bin"] = writer.finish()
        sizes = {"tokens": self._base.tokens, "documents": self._base.documents}
        manifest = {"format": OVERLAY, "version": VERSION, **self._identity, **sizes, "files": files}
        atomic_json(self.path / MANIFEST, manifest)
        (self.path / _PROGRESS).unlink(missing_ok=True)
        self._maps.clear()
        for name in self._columns:
            self._temporary(name).unlink()

    def _flush(self) -> None:
        for values in self._maps.values():
            if isinstance(values, np.memmap):
                values.flush()

    def _progress(self) -> int:
        """`done` of an earlier process for the same columns of the same store, else 0."""
        try:
            progress = json.loads((self.path / _PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return 0
        same = all(progress.get(key) == value for key, value in self._identity.items())
        return int(progress["done"]) if same and all(self._temporary(name).exists() for name in self._columns) else 0

    def _temporary(self, name: str) -> Path:
        return self.path / f"{name}.part"

    def _shape(self, name: str) -> tuple[int, ...]:
        spec = self._columns[name]
        rows = self._base.tokens if spec.per == "token" else self._base.documents
        return (rows,) if spec.width == 1 else (rows, spec.width)

    def _create(self, name: str) -> None:
        spec = self._columns[name]
        dtype, count = np.dtype(spec.dtype), int(np.prod(self._shape(name)))
        fill = np.nan if spec.per == "document" and dtype.kind == "f" else 0
        chunk = np.full(min(count, max(1, _CHUNK // dtype.itemsize)), fill, dtype)
        with self._temporary(name).open("wb") as file:
            if fill == 0:
                file.truncate(count * dtype.itemsize)  # a sparse file of zeros
                return
            for start in range(0, count, max(1, len(chunk))):
                file.write(chunk[: count - start].tobytes())

    def _map(self, name: str) -> np.ndarray:
        dtype, shape = self._columns[name].dtype, self._shape(name)
        if not np.prod(shape):  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        return np.memmap(self._temporary(name), dtype, mode="r+", shape=shape)
