"""Exact deduplication: texts that are equal up to white space; the first occurrence is kept.

The hash (BLAKE2b, 128 bits) covers the complete text, so short texts are deduplicated like long ones and a shared
header alone is no duplicate. Memory holds only the hashes, about 60 bytes per document while they are sorted.
"""

import hashlib
import itertools

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.corpus.readers.utf8 import find_sequences, flatten

EXACT_DUPLICATE = "exact_duplicate"
"""The `drop_reason` of a repeated document."""
_BLANK = 0x20
_MULTIBYTE_BLANKS = {  # lead byte -> its continuation bytes, as one big-endian number
    0xC2: [0x85, 0xA0],
    0xE1: [0x9A80],
    0xE2: [*range(0x8080, 0x808B), 0x80A8, 0x80A9, 0x80AF, 0x819F],
    0xE3: [0x8080],
}


def squeeze(texts: pl.Series) -> pa.LargeStringArray:
    """`" ".join(text.split())` of each text: words separated by one blank.

    One numpy pass over the bytes of the batch is several times faster than splitting each text into Python strings.
    """
    data, starts = flatten(texts)
    data, starts = _collapse(data.copy(), starts)
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(starts), pa.py_buffer(data))


def _collapse(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replace each run of blanks by one blank and strip both ends of each text; returns new data and starts [n + 1]."""
    blank = blanks(data)
    data[np.flatnonzero(blank & (data != _BLANK))] = _BLANK
    ends = starts[1:][starts[1:] > starts[:-1]] - 1
    extra = blank.copy()
    extra[:-1] &= blank[1:]  # keeps the last blank of a run
    extra[ends] = blank[ends]  # the next byte belongs to another text
    data, starts = data[~extra], starts - np.searchsorted(np.flatnonzero(extra), starts)
    heads = starts[:-1][starts[1:] > starts[:-1]]
    heads = heads[data[heads] == _BLANK]
    if len(heads):
        data, starts = np.delete(data, heads), starts - np.searchsorted(heads, starts)
    return data, starts


def blanks(data: np.ndarray) -> np.ndarray:
    """Boolean mask of the UTF-8 bytes that belong to white space as `str.split` defines it."""
    blank = (data == _BLANK) | (data - np.uint8(0x09) < 5) | (data - np.uint8(0x1C) < 4)  # differences wrap around
    for lead, continuations in _MULTIBYTE_BLANKS.items():
        positions = find_sequences(data, lead, continuations)
        for offset in range(3 if continuations[0] > 0xFF else 2):
            blank[positions + offset] = True
    return blank


def fingerprints(squeezed: pa.LargeStringArray) -> list[bytes]:
    """A 16-byte hash of each text. Takes the output of `squeeze`, so texts that differ in white space hash equally."""
    _, offsets, values = squeezed.buffers()
    starts = np.frombuffer(offsets, np.int64)[: len(squeezed) + 1].tolist()
    data = memoryview(values or b"")
    return [hashlib.blake2b(data[a:b], digest_size=16).digest() for a, b in itertools.pairwise(starts)]


def clusters(keys: list[bytes]) -> np.ndarray:
    """The `cluster` column: the first 8 bytes of each fingerprint as uint64."""
    return np.array([int.from_bytes(key[:8], "little") for key in keys], dtype=np.uint64)


def rows_of(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column of fixed-size binary, N x bytes uint8."""
    array = column.combine_chunks()
    width = column.type.byte_width
    flat = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, width)
    return flat[array.offset : array.offset + len(array)]


def repeats(keys: np.ndarray) -> np.ndarray:
    """Whether each fingerprint occurred before, N bool.

    Args:
        keys: N x 16 uint8.
    """
    halves = np.ascontiguousarray(keys).view(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in the order of their documents
    ordered = halves[order]
    out = np.zeros(len(keys), bool)
    out[order[1:]] = (ordered[1:] == ordered[:-1]).all(1)
    return out
