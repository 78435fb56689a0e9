"""Splits documents into train and val after deduplication, deterministically.

The split by hash depends on the document's text (or group's name) and the fraction alone. It does not change when other
documents are added or removed, when the seed changes, or in another corpus with the same document. A larger fraction
holds out a superset.

`tail` is nanoGPT's split: the last characters of the kept text, in order. The document on the border is cut in two.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.core.errors import UserError
from ingot.corpus.settings import HoldoutSettings

_SALT = b"ingot.holdout.1"


def split_by_hash(table: pa.Table, holdout: HoldoutSettings) -> pa.Table:
    """Set the `split` column by the hash of the cluster or of the group."""
    if holdout.by == "group":
        names = table["group"].to_pylist()
        is_val = {name: _uniform(name.encode()) < holdout.fraction for name in set(names)}
        mask = [is_val[name] for name in names]
    else:
        mask = [_uniform(int(c).to_bytes(8, "little")) < holdout.fraction for c in table["cluster"].to_numpy()]
    return set_split(table, np.array(mask, dtype=bool))


def _uniform(name: bytes) -> float:
    """A hash of the name as a number in [0, 1)."""
    digest = hashlib.blake2b(name, digest_size=8, key=_SALT).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def set_split(table: pa.Table, is_val: np.ndarray) -> pa.Table:
    """Set `split` to "val" where the mask [rows] is true, to "train" elsewhere."""
    values = pa.array(np.where(is_val, "val", "train").tolist(), pa.string())
    return table.set_column(table.schema.get_field_index("split"), "split", values)


class TailSplitter:
    """Splits kept documents, given in order, at character `int((1 - fraction) * characters)`.

    Args:
        characters: total number of characters of the kept text.
        fraction: the fraction of the characters to hold out.
        divisible: whether to cut the document on the border; if not, all of it is held out.
    """

    def __init__(self, characters: int, fraction: float, divisible: bool):
        self._train_left = int((1 - fraction) * characters)
        self._divisible = divisible
        self.cut_documents = 0

    def split(self, table: pa.Table) -> pa.Table:
        """The table with `split` set; it gains a row if a document is cut."""
        ends = np.cumsum(pc.utf8_length(table["text"]).to_numpy())
        train = int(np.searchsorted(ends, self._train_left, side="right"))
        cut_at = self._train_left - (int(ends[train - 1]) if train else 0)
        tables = [table.slice(0, train), table.slice(train)]
        if train < table.num_rows and cut_at and self._divisible:
            halves = _cut(table.slice(train, 1), cut_at)
            tables = [tables[0], halves.slice(0, 1), halves.slice(1), table.slice(train + 1)]
            train += 1
            self.cut_documents += 1
        self._train_left = 0 if train < table.num_rows else max(self._train_left - int(ends[-1]), 0)
        joined = pa.concat_tables(tables)
        return set_split(joined, np.arange(joined.num_rows) >= train)


def _cut(document: pa.Table, characters: int) -> pa.Table:
    row = document.to_pylist()[0]
    halves = (row["text"][:characters], row["text"][characters:])
    return pa.Table.from_pylist([{**row, "text": t, "bytes": len(t.encode())} for t in halves], document.schema)


def check_split(holdout: HoldoutSettings, train: int, val: int) -> None:
    """Refuse a split without training or without validation documents.

    Args:
        holdout: the settings of the split.
        train, val: number of documents in each split.

    Raises:
        UserError: one of them is 0 although the settings hold out a part.
    """
    if holdout.fraction == 0 or (train and val):
        return
    empty, total = ("held-out" if train else "training"), train + val
    raise UserError(
        f'holdout: fraction = {holdout.fraction:g} by = "{holdout.by}" leaves no {empty} document of {total}; '
        'use by = "tail" (it can cut a document) or another share'
    )
