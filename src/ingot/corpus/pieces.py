"""Words, lines and paragraphs of a batch of texts, hashed without a loop over them.

The hash of bytes a .. e is (S[e] - S[a]) / p^a mod 2^64 with the prefix sums S[k] = sum of byte i times p^i, so equal
pieces have equal hashes wherever they stand.

Shapes: B bytes of all texts, N texts, P pieces.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

CHUNK_BYTES = 1 << 18
"""Text that is hashed at once: its numbers fit the cache, which is twice as fast as 1 MB."""
BASE = 0x9E3779B97F4A7C15 | 1


class Pieces(NamedTuple):
    """Pieces of texts, in order."""

    heads: np.ndarray
    """Their first bytes, P."""
    ends: np.ndarray
    """The bytes after them, P."""
    starts: np.ndarray
    """The number of the first piece of each text, and of all pieces, N + 1."""

    def texts_of(self, pieces_: np.ndarray) -> np.ndarray:
        """The text of each of some pieces, given by their numbers."""
        return np.searchsorted(self.starts, pieces_, side="right") - 1

    @property
    def counts(self) -> np.ndarray:
        """Pieces of each text, N."""
        return np.diff(self.starts)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums of a value a piece over each text, N."""
        total = np.append(0, np.cumsum(values))
        return total[self.starts[1:]] - total[self.starts[:-1]]


class Part(NamedTuple):
    """Some texts of a batch, next to each other."""

    first: int
    last: int
    """The number of the first of them, and of the one after the last."""
    data: np.ndarray
    starts: np.ndarray
    """Their first bytes in `data`, and its end."""


def chunks(data: np.ndarray, starts: np.ndarray, size: int = CHUNK_BYTES) -> Iterator[Part]:
    """The texts in parts of about `size` bytes, at least one text each."""
    first = 0
    while first < len(starts) - 1:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + size, side="right")) - 1)
        yield Part(first, last, data[starts[first] : starts[last]], starts[first : last + 1] - starts[first])
        first = last


def split(is_part: np.ndarray, starts: np.ndarray, begins: np.ndarray | None = None) -> Pieces:
    """The runs of bytes that are parts of a piece; a piece never reaches into the next text.

    Args:
        is_part: B bool.
        starts: the first byte of each text, and B; N + 1.
        begins: B bool: parts that begin a piece, whatever is before them.
    """
    heads = is_part.copy()
    heads[1:] &= ~is_part[:-1]
    if begins is not None:
        heads |= begins
    texts = starts[:-1][starts[:-1] < starts[1:]]
    heads[texts] |= is_part[texts]
    borders = np.flatnonzero(heads | ~is_part)
    of_heads = np.flatnonzero(heads[borders])
    first = borders[of_heads]
    return Pieces(first, np.append(borders, len(is_part))[of_heads + 1], np.searchsorted(first, starts))


def hashes(data: np.ndarray, pieces: Pieces) -> np.ndarray:
    """A hash of each piece, P uint64."""
    powers, inverses = _POWERS, _INVERSES
    if len(data) >= len(powers):
        powers, inverses = _powers(BASE, len(data) + 1), _powers(pow(BASE, -1, 1 << 64), len(data) + 1)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * powers[: len(data)], out=sums[1:])
    return mix((sums[pieces.ends] - sums[pieces.heads]) * inverses[pieces.heads])


def runs(hashes_P: np.ndarray, pieces: Pieces, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The runs of `length` pieces within a text: the piece that each begins with, and its hash (uint64)."""
    number = max(0, len(hashes_P) - (length - 1))
    out = np.zeros(number, np.uint64)
    for i in range(length):
        out *= np.uint64(BASE)
        out += hashes_P[i : i + number]
    inside = np.ones(len(hashes_P), bool)
    for i in range(1, length):  # the last pieces of a text begin no run
        last = pieces.starts[1:] - i
        inside[last[last >= pieces.starts[:-1]]] = False
    at = np.flatnonzero(inside[:number])
    return at, mix(out[at])


def mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: spreads every bit over all bits. In place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _powers(base: int, number: int) -> np.ndarray:
    powers = np.full(number, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS = _powers(BASE, CHUNK_BYTES + 1)
_INVERSES = _powers(pow(BASE, -1, 1 << 64), CHUNK_BYTES + 1)
