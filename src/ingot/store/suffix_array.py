"""Suffix arrays: the positions of a text in the order of the suffixes that begin there, and search in them.

All places of a phrase stand together in a suffix array, so that two binary searches find them, whatever its length.
Source: Manber and Myers, "Suffix arrays: a new method for on-line string searches" (1993).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Protocol

import numpy as np

BUILD_BYTES = 50
"""Memory for each byte of a text while its suffix array is built (`benchmarks/search.py` measures it)."""
_FIRST = 8
"""Bytes by which suffixes are sorted first, those of one integer."""
_COMPARED = 256
"""Bytes of a phrase that are compared first when its longest prefix is sought."""


class Text(Protocol):
    """Bytes that give slices as `bytes`, such as `bytes` or an `mmap`."""

    def __getitem__(self, key: slice, /) -> bytes: ...


def suffix_array(text: np.ndarray) -> np.ndarray:
    """The suffix array of a text by prefix doubling: suffixes that agree in h bytes are told apart by the rank of what
    follows. Only those that are not told apart yet are sorted again.

    Args:
        text: bytes [n] (u8), n < 2^31; the last one is not 0.

    Returns:
        int32 [n].

    Shapes: n bytes, m suffixes that are not yet told apart.
    """
    n = len(text)
    assert 0 < n < 2**31
    assert text[-1], "a byte 0 at the end could not be told from what is after it"
    key = _first_bytes(text)
    suffixes = np.argsort(key).astype(np.int32)
    heads = _heads(key[suffixes])
    del key
    rank = np.empty(n, np.int32)  # the place of the first suffix that agrees with this one so far
    rank[suffixes] = np.repeat(heads, _sizes(heads, n))
    places, h = _ties(heads, n), _FIRST
    while len(places):
        tied = suffixes[places]
        key = rank[tied].astype(np.int64)  # and below, in place: memory bounds the text that can be searched
        key <<= 32
        inside = np.flatnonzero(tied < n - h)
        key[inside] |= rank[tied[inside] + h] + 1  # 0 after the end
        del inside
        order = np.argsort(key)
        suffixes[places] = tied = tied[order]
        key = key[order]
        del order
        heads = _heads(key)
        rank[tied] = places[np.repeat(heads, _sizes(heads, len(tied)))]
        places, h = places[_ties(heads, len(tied))], 2 * h
    return suffixes


def find(text: Text, suffixes: np.ndarray, phrase: bytes) -> tuple[int, int]:
    """The range [first, last) of the suffixes that begin with a phrase; empty if it is not in the text."""
    prefix = _prefix(text, len(phrase))
    first = bisect_left(suffixes, phrase, key=prefix)
    return first, bisect_right(suffixes, phrase, lo=first, key=prefix)


def longest_prefix(text: Text, suffixes: np.ndarray, phrase: bytes) -> int:
    """Length of the longest prefix of a phrase that is in the text: it begins a suffix next to the phrase's place."""
    compared = min(_COMPARED, len(phrase))
    while True:
        head, prefix = phrase[:compared], _prefix(text, compared)
        place = bisect_left(suffixes, head, key=prefix)
        length = max(_common(head, prefix(start)) for start in suffixes[max(0, place - 1) : place + 1])
        if length < compared or compared == len(phrase):
            return length
        compared = min(4 * compared, len(phrase))


def _common(a: bytes, b: bytes) -> int:
    """Number of bytes in which two texts agree from their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _prefix(text: Text, length: int) -> Callable[[np.int32], bytes]:
    def prefix(start: np.int32) -> bytes:
        first = int(start)
        return text[first : first + length]

    return prefix


def _first_bytes(text: np.ndarray) -> np.ndarray:
    """The first bytes of every suffix as an integer [n] (u64) of the same order; 0 after the end."""
    padded = np.append(text, np.zeros(_FIRST, np.uint8))
    key = np.zeros(len(text), np.uint64)
    for i in range(_FIRST):
        key <<= np.uint64(8)
        key |= padded[i : i + len(text)]
    return key


def _heads(key: np.ndarray) -> np.ndarray:
    """Places in sorted keys at which a new value begins."""
    return np.flatnonzero(np.append(True, key[1:] != key[:-1]))


def _sizes(heads: np.ndarray, n: int) -> np.ndarray:
    """Elements of each group, given their first places, of n elements in all."""
    return np.diff(np.append(heads, n))


def _ties(heads: np.ndarray, n: int) -> np.ndarray:
    """The places of all elements of groups with more than one (int32)."""
    sizes = _sizes(heads, n)
    return np.flatnonzero(np.repeat(sizes > 1, sizes)).astype(np.int32)
