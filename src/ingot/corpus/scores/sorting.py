"""Documents in the order of a score.

Shapes: N documents.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingot.corpus.documents import DocumentWriter
from ingot.corpus.scores.settings import Sorting

PART_BYTES, MAX_PARTS = 128 << 20, 256
"""Text that is sorted in memory at once; it is more where that would make more than `MAX_PARTS` parts."""
_PLACE = "_place"


def sorted_rows(scores: np.ndarray, sorting: Sorting, clusters: np.ndarray) -> np.ndarray:
    """The documents in the order of a score, N int64; of equal scores in their own order.

    The k-th copies of documents (`repeat`) follow all (k - 1)-th ones, in the same order: beside its original, a copy
    could be packed into the same row and teach the model to copy.

    Args:
        scores: N float32; NaN where there is none.
        sorting: the order.
        clusters: equal numbers for copies, N.
    """
    order = np.argsort(clusters, kind="stable")
    is_first = np.append(True, clusters[order][1:] != clusters[order][:-1])[: len(order)]
    copies = np.empty(len(order), np.int64)
    copies[order] = np.arange(len(order)) - np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    return np.lexsort((scores if sorting.first == "low" else -scores, np.isnan(scores), copies))


class SortedDocuments:
    """Writes documents in another order than they come in, with memory for a part of them.

    First they are distributed to files, by their places in the order; then one file after the other is sorted.

    Args:
        writer: gets the documents in order.
        order: the numbers of the documents to write.
        sizes: bytes of all documents, N.
        scratch: a directory that is made and removed.
    """

    def __init__(self, writer: DocumentWriter, order: np.ndarray, sizes: np.ndarray, scratch: Path):
        self._writer, self._scratch = writer, scratch
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._places = np.full(len(sizes), -1, np.int64)
        self._places[order] = np.arange(len(order))
        before = np.cumsum(sizes[order]) - sizes[order]
        size = max(PART_BYTES, int(sizes[order].sum()) // MAX_PARTS + 1)
        self._parts = np.full(len(sizes), -1, np.int64)
        self._parts[order] = before // size
        self._files: dict[int, Any] = {}

    def write(self, table: pa.Table, first: int) -> None:
        """Take documents, in any order; those that `order` does not name are left out.

        Args:
            table: documents of the corpus.
            first: the number of the first of them.
        """
        rows = slice(first, first + table.num_rows)
        table = table.append_column(_PLACE, pa.array(self._places[rows]))
        for part in np.unique(self._parts[rows]).tolist():
            if part < 0:
                continue
            if part not in self._files:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                self._files[part] = pa.ipc.new_file(str(self._path(part)), table.schema, options=options)
            self._files[part].write_table(table.take(np.flatnonzero(self._parts[rows] == part)))

    def flush(self) -> None:
        """Write all documents."""
        for part, file in sorted(self._files.items()):
            file.close()
            with pa.memory_map(str(self._path(part))) as source:
                table = pa.ipc.open_file(source).read_all()
            order = np.argsort(table[_PLACE].to_numpy())
            self._writer.write(table.drop_columns([_PLACE]).take(order))
        self._writer.flush()
        shutil.rmtree(self._scratch)

    def _path(self, part: int) -> Path:
        return self._scratch / f"{part:03d}.arrow"
