"""Exact duplicates: equal texts, differences in white space aside; the first one seen stays.

The hash (BLAKE2b, 128 bits) covers the whole text, so a short text is deduplicated like a long one, and one shared
header drops nothing. Only hashes are kept in memory, about 100 bytes a document.
"""

import hashlib
import itertools

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.corpus.readers.utf8 import flatten, followed_by

EXACT_DUPLICATE = "exact_duplicate"
"""The reason of a document that is dropped for another one."""
_BLANK = 0x20
_WIDE_BLANKS = {  # lead byte -> what follows it in UTF-8, as one number
    0xC2: [0x85, 0xA0],
    0xE1: [0x9A80],
    0xE2: [*range(0x8080, 0x808B), 0x80A8, 0x80A9, 0x80AF, 0x819F],
    0xE3: [0x8080],
}


def squeeze(texts: pl.Series) -> pa.LargeStringArray:
    """What `" ".join(text.split())` is for each text, for a batch at once: words with one blank between them.

    One pass of numpy over the bytes of all texts is several times faster than a Python string for every word.
    """
    data, starts = flatten(texts)
    data, starts = _collapse(data.copy(), starts)
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(starts), pa.py_buffer(data))


def _collapse(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of blanks become one blank, none at the ends of a text; starts [n + 1] and data [bytes] are replaced."""
    blank = _blanks(data)
    data[np.flatnonzero(blank & (data != _BLANK))] = _BLANK
    ends = starts[1:][starts[1:] > starts[:-1]] - 1
    extra = blank.copy()
    extra[:-1] &= blank[1:]  # the last one of a run stays
    extra[ends] = blank[ends]  # the byte after belongs to another text
    data, starts = data[~extra], starts - np.searchsorted(np.flatnonzero(extra), starts)
    heads = starts[:-1][starts[1:] > starts[:-1]]
    heads = heads[data[heads] == _BLANK]
    if len(heads):
        data, starts = np.delete(data, heads), starts - np.searchsorted(heads, starts)
    return data, starts


def _blanks(data: np.ndarray) -> np.ndarray:
    """Which bytes of UTF-8 text belong to white space, as `str.split` has it."""
    blank = (data == _BLANK) | (data - np.uint8(0x09) < 5) | (data - np.uint8(0x1C) < 4)  # differences wrap around
    for lead, known in _WIDE_BLANKS.items():
        place = followed_by(data, lead, known)
        for more in range(3 if known[0] > 0xFF else 2):
            blank[place + more] = True
    return blank


def fingerprints(squeezed: pa.LargeStringArray) -> list[bytes]:
    """16 bytes per text that are equal exactly when the texts are, white space aside. Takes what `squeeze` gave."""
    _, offsets, values = squeezed.buffers()
    starts = np.frombuffer(offsets, np.int64)[: len(squeezed) + 1].tolist()
    data = memoryview(values or b"")
    return [hashlib.blake2b(data[a:b], digest_size=16).digest() for a, b in itertools.pairwise(starts)]


def clusters(keys: list[bytes]) -> np.ndarray:
    """The `cluster` column: the first 8 bytes of each fingerprint as uint64."""
    return np.array([int.from_bytes(key[:8], "little") for key in keys], dtype=np.uint64)


class Seen:
    """Remembers fingerprints in document order."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def repeated(self, keys: list[bytes]) -> list[bool]:
        """Whether each key came before, here or in an earlier call."""
        return [self._again(key) for key in keys]

    def _again(self, key: bytes) -> bool:
        if key in self._keys:
            return True
        self._keys.add(key)
        return False
