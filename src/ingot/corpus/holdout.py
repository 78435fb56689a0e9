"""Which documents are held out, decided after deduplication and the same in every run.

By hash, a document's (or group's) split depends on nothing but its text (or name) and the share: it stays where it is
when other documents come and go, when the seed changes, and in every corpus that holds it. Two corpora made from the
same modules hold out the same modules. A larger share keeps what a smaller one held out.

`tail` is nanoGPT's split: the last characters of the kept text, in order. The document on the border is cut in two.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

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
        held = {name: _draw(name.encode()) < holdout.share for name in set(names)}
        chosen = [held[name] for name in names]
    else:
        chosen = [_draw(int(c).to_bytes(8, "little")) < holdout.share for c in table["cluster"].to_numpy()]
    return set_split(table, np.array(chosen, dtype=bool))


def _draw(name: bytes) -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.blake2b(name, digest_size=8, key=_SALT).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def set_split(table: pa.Table, held: np.ndarray) -> pa.Table:
    """The table with `split` = "val" where held, "train" elsewhere."""
    values = pa.array(np.where(held, "val", "train").tolist(), pa.string())
    return table.set_column(table.schema.get_field_index("split"), "split", values)


class Tail:
    """Splits kept documents, given in order, at the `int((1 - share) * characters)`-th character.

    Args:
        characters: of all kept text.
        share: of the characters to hold out.
        divisible: whether the document on the border may be cut; a conversation is held out whole instead.
    """

    def __init__(self, characters: int, share: float, divisible: bool):
        self._left = int((1 - share) * characters)
        self._divisible = divisible
        self.cut = 0

    def split(self, table: pa.Table) -> pa.Table:
        """The table with its splits; one row longer where a document was cut."""
        ends = np.cumsum(pc.utf8_length(table["text"]).to_numpy())
        train = int(np.searchsorted(ends, self._left, side="right"))
        inside = self._left - (int(ends[train - 1]) if train else 0)
        parts = [table.slice(0, train), table.slice(train)]
        if train < table.num_rows and inside and self._divisible:
            halves = _cut(table.slice(train, 1), inside)
            parts = [parts[0], halves.slice(0, 1), halves.slice(1), table.slice(train + 1)]
            train += 1
            self.cut += 1
        self._left = 0 if train < table.num_rows else max(self._left - int(ends[-1]), 0)
        joined = pa.concat_tables(parts)
        return set_split(joined, np.arange(joined.num_rows) >= train)


def _cut(document: pa.Table, characters: int) -> pa.Table:
    row = document.to_pylist()[0]
    halves = (row["text"][:characters], row["text"][characters:])
    return pa.Table.from_pylist([{**row, "text": t, "bytes": len(t.encode())} for t in halves], document.schema)


def check_split(holdout: HoldoutSettings, train: int, val: int) -> None:
    """Refuse a split without training or without validation documents.

    Raises:
        UserError: one of them is empty although a share was asked for.
    """
    if holdout.share == 0 or (train and val):
        return
    empty, total = ("held-out" if train else "training"), train + val
    raise UserError(
        f'holdout: share = {holdout.share:g} by = "{holdout.by}" leaves no {empty} document of {total}; '
        'use by = "tail" (it splits text of any number of documents) or another share'
    )
