"""Splits documents into train and val after deduplication, deterministically.

The split by hash depends on the document's text (or group's name) and the fraction alone. It does not change when other
documents are added or removed, when the seed changes, or in another corpus with the same document. A larger fraction
holds out a superset.

`tail` and `characters` hold out an exact fraction of the characters and need all documents for it. `tail` is nanoGPT's
split, the last characters in reading order. `characters` takes documents in the order of their hash, so that it draws
those that `document` draws, until they are enough. The document on the border is cut in two.
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
BY_SIZE = ("tail", "characters")
"""Splits that need the sizes of all documents."""


def split_by_hash(table: pa.Table, holdout: HoldoutSettings) -> pa.Table:
    """Set the `split` column by the hash of the cluster or of the group."""
    if holdout.by == "group":
        names = table["group"].to_pylist()
        is_val = {name: _uniform(name.encode()) < holdout.fraction for name in set(names)}
        mask = [is_val[name] for name in names]
    else:
        mask = _of_clusters(table["cluster"].to_numpy()) < holdout.fraction
    return set_split(table, np.array(mask, dtype=bool))


def _uniform(name: bytes) -> float:
    """A hash of the name as a number in [0, 1)."""
    digest = hashlib.blake2b(name, digest_size=8, key=_SALT).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _of_clusters(clusters: np.ndarray) -> np.ndarray:
    """A hash of each cluster as a number in [0, 1)."""
    return np.array([_uniform(int(cluster).to_bytes(8, "little")) for cluster in clusters], np.float64)


def set_split(table: pa.Table, is_val: np.ndarray) -> pa.Table:
    """Set `split` to "val" where the mask [rows] is true, to "train" elsewhere."""
    values = pa.array(np.where(is_val, "val", "train").tolist(), pa.string())
    return table.set_column(table.schema.get_field_index("split"), "split", values)


def train_characters(
    holdout: HoldoutSettings, clusters: np.ndarray, characters: np.ndarray, divisible: bool
) -> np.ndarray:
    """How many characters of each document, its first ones, are trained on; the others are held out.

    Args:
        holdout: the settings of a split by `tail` or `characters`.
        clusters: [documents] the column `cluster` of all kept documents, in order.
        characters: [documents] their numbers of characters.
        divisible: whether to cut the document on the border; if not, all of it is held out.

    Returns:
        [documents] integers from 0 to `characters`.
    """
    order, several = np.arange(len(clusters)), np.zeros(len(clusters), dtype=bool)
    if holdout.by == "characters":
        order = np.argsort(-_of_clusters(clusters), kind="stable")
        _, cluster, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
        several = sizes[cluster] > 1
    starts = np.empty_like(characters)
    starts[order] = np.cumsum(characters[order]) - characters[order]
    train = np.clip(int((1 - holdout.fraction) * int(characters.sum())) - starts, 0, characters)
    held_out = train < characters
    if not divisible:
        train[held_out] = 0
    train[several & np.isin(clusters, clusters[held_out])] = 0  # equal documents stay on one side
    return train


def split_at(table: pa.Table, train: np.ndarray) -> pa.Table:
    """Set `split`, given the result of `train_characters` for the table's rows; it gains a row where one is cut."""
    characters = pc.utf8_length(table["text"]).to_numpy()
    tables, done = [], 0
    for row in np.flatnonzero((train > 0) & (train < characters)):
        halves = _cut(table.slice(row, 1), int(train[row]))
        tables += [set_split(table.slice(done, row - done), train[done:row] < characters[done:row])]
        tables += [set_split(halves, np.array([False, True]))]
        done = row + 1
    return pa.concat_tables([*tables, set_split(table.slice(done), train[done:] < characters[done:])])


def _cut(document: pa.Table, characters: int) -> pa.Table:
    row = document.to_pylist()[0]
    halves = (row["text"][:characters], row["text"][characters:])
    return pa.Table.from_pylist([{**row, "text": t, "bytes": len(t.encode())} for t in halves], document.schema)


def check_split(holdout: HoldoutSettings, train: int, val: int, divisible: bool) -> None:
    """Refuse a split without training or without validation documents.

    Args:
        holdout: the settings of the split.
        train, val: number of documents in each split.
        divisible: whether documents can be cut.

    Raises:
        UserError: one of them is 0 although the settings hold out a part.
    """
    if holdout.fraction == 0 or (train and val):
        return
    empty, total = ("held-out" if train else "training"), train + val
    advice = "choose another fraction, or add documents"
    if divisible and holdout.by not in BY_SIZE:
        advice = 'use by = "characters" (it can cut a document) or another fraction'
    raise UserError(
        f'holdout: fraction = {holdout.fraction:g} by = "{holdout.by}" leaves no {empty} document of {total}; {advice}'
    )


def share_notice(holdout: HoldoutSettings, held_out: int, total: int, divisible: bool) -> str | None:
    """One line if less than half or more than twice the wanted fraction of the text is held out.

    Args:
        holdout: the settings of the split.
        held_out, total: bytes of the documents held out, and of all that were kept.
        divisible: whether documents can be cut.
    """
    if not total or holdout.fraction / 2 <= held_out / total <= holdout.fraction * 2:
        return None
    by_size = divisible and holdout.by not in BY_SIZE
    advice = 'by = "characters" takes that into account' if by_size else "another fraction may come closer"
    return (
        f"holdout: {held_out / total:.1%} of the text is held out, expected {holdout.fraction:.1%}, because few "
        f"{'groups' if holdout.by == 'group' else 'documents'} are drawn, or they differ in size; {advice}"
    )
