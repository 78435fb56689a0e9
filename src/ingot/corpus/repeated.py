"""Text that documents share: lines that are removed from all of them, and runs of words that make one a copy.

**Lines.** A line (without blanks around it) that many documents have is navigation, a licence or a signature; it is
removed from all of them. A repeated paragraph goes with its lines.

**Runs of words.** A document is dropped if a fraction of its runs of 13 words occurred in documents that were kept
before it (Brown et al. 2020, arXiv:2005.14165, appendix C, use runs of 13 words). All runs count, at every position: so
a text of exactly 13 words has one, a shift by a word hides nothing, and a shared header is a small fraction.

Both work on hashes of 8 bytes; collisions are one in 10^5 for a corpus of 10^7 lines.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

from collections.abc import Iterable

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ingot.corpus.minhash import run_hashes
from ingot.corpus.pieces import Pieces, chunks, hashes
from ingot.corpus.readers.utf8 import flatten

LINES, RUNS = "_lines", "_runs"
"""Columns with the hashes of a document's lines, and of its runs of words; each different one once."""
REMOVED_LINES = "_removed_lines"
"""Column with the number of lines that were removed from a document."""
REPEATED_LINES, OVERLAP = "repeated_lines", "overlap"
"""The `drop_reason` of a document that consists of repeated lines, and of one whose runs of words occurred before."""


def line_hashes(texts: pl.Series, min_characters: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each line (L uint64) and the number of its text; lines of fewer characters have the hash 0."""
    lines = texts.str.split("\n")
    numbers = np.repeat(np.arange(len(texts)), lines.list.len().to_numpy())
    flat = lines.explode(empty_as_null=False).str.strip_chars()
    data, starts = flatten(flat)
    out = np.zeros(len(flat), np.uint64)
    for part in chunks(data, starts):
        pieces = Pieces(part.starts[:-1], part.starts[1:], np.arange(len(part.starts)))
        out[part.first : part.last] = np.maximum(hashes(part.data, pieces), 1)
    out[(flat.str.len_chars() < min_characters).to_numpy()] = 0
    return out, numbers


def lines_column(texts: pl.Series, min_characters: int) -> pa.Array:
    """The column `LINES`."""
    found, numbers = line_hashes(texts, min_characters)
    long = found != 0
    return _sets(found[long], numbers[long], len(texts))


def runs_column(texts: pl.Series, words: int) -> pa.Array:
    """The column `RUNS`."""
    found, numbers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for part in chunks(*flatten(texts)):
        pieces, at, keys = run_hashes(part.data, part.starts, words)
        found.append(keys)
        numbers.append(pieces.texts_of(at) + part.first)
    return _sets(np.concatenate(found), np.concatenate(numbers), len(texts))


def _sets(values: np.ndarray, numbers: np.ndarray, documents: int) -> pa.Array:
    """Lists of the different values of each document."""
    order = np.lexsort((values, numbers))
    values, numbers = values[order], numbers[order]
    first = np.ones(len(values), bool)
    first[1:] = (values[1:] != values[:-1]) | (numbers[1:] != numbers[:-1])
    offsets = np.append(0, np.cumsum(np.bincount(numbers[first], minlength=documents)))
    return pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(values[first]))


def frequent(columns: Iterable[np.ndarray], documents: int) -> np.ndarray:
    """The hashes that occur in more than `documents` documents, sorted.

    Args:
        columns: hashes of all documents, those of one document different.
        documents: the most in which a line may occur.
    """
    values, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *columns]), return_counts=True)
    return values[counts > documents]


def remove_lines(table: pa.Table, repeated: np.ndarray, min_characters: int) -> pa.Table:
    """Documents without repeated lines: `text` and `bytes` change, `REMOVED_LINES` counts them.

    A document that has no other text gets the reason `REPEATED_LINES`, if it has none, and keeps its text.
    """
    texts = table["text"].to_pylist()
    removed, empty = np.zeros(len(texts), np.int32), np.zeros(len(texts), bool)
    kept = pc.is_null(table["drop_reason"]).to_numpy()
    column = table[LINES].combine_chunks()
    has = np.isin(column.flatten().to_numpy(), repeated)
    owners = np.repeat(np.arange(len(texts)), pc.list_value_length(column).to_numpy())
    for row in np.unique(owners[has & kept[owners]]).tolist():
        found, _ = line_hashes(pl.Series([texts[row]]), min_characters)
        drop = np.isin(found, repeated)
        rest = "\n".join(line for line, gone in zip(texts[row].split("\n"), drop, strict=True) if not gone)
        empty[row] = not rest.strip()
        if not empty[row]:
            texts[row], removed[row] = rest, drop.sum()
    text = pa.array(texts, table.schema.field("text").type)
    reason = pc.if_else(pa.array(empty), pa.scalar(REPEATED_LINES, pa.large_string()), table["drop_reason"])
    columns = {"text": text, "drop_reason": reason}
    if "bytes" in table.column_names:
        columns["bytes"] = pc.binary_length(text).cast(table.schema.field("bytes").type)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table.append_column(REMOVED_LINES, pa.array(removed))


def overlapping(columns: Iterable[pa.Array], dropped: np.ndarray, fraction: float) -> np.ndarray:
    """Whether at least `fraction` of a document's runs occurred in documents that are kept before it, N bool.

    Args:
        columns: `RUNS` of all documents, in order.
        dropped: documents that are not compared, N bool.
        fraction: of its different runs.
    """
    values, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for column in columns:
        values.append(column.flatten().to_numpy())
        sizes.append(pc.list_value_length(column).to_numpy().astype(np.int64))
    sizes = np.concatenate(sizes)
    _, numbers = np.unique(np.concatenate(values), return_inverse=True)
    seen, ends = np.zeros(len(numbers), bool), np.cumsum(sizes)
    out = np.zeros(len(sizes), bool)
    for document in np.flatnonzero((sizes > 0) & ~dropped).tolist():
        own = numbers[ends[document] - sizes[document] : ends[document]]
        out[document] = np.count_nonzero(seen[own]) >= fraction * len(own)
        if not out[document]:
            seen[own] = True
    return out
