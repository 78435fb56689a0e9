"""The order of training rows as a pure function of (seed, position), without state.

A keyed permutation (a Feistel network with cycle walking) shuffles the row numbers of an epoch in O(1) memory at any
length: the k-th row is computed. Error diffusion interleaves the sources of a mixture, so that any window of rows has
the wanted fractions to within two rows of each source; random sampling of sources would deviate more. Batch sizes are
in `data/batch_size.py`, the sequence of phases in `stages/training/timeline.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.core.errors import UserError

_ROUNDS = 6
PATTERN_LENGTH = 10_000
"""Length of the repeating mixture pattern; fractions are exact to 1 / PATTERN_LENGTH."""


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of uint64 in which each bit affects all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys_of(*parts: int | np.ndarray) -> np.ndarray:
    """64-bit keys (uint64) from a sequence of integers or int64 arrays, which are broadcast; the order matters."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            number = np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)
            state = mix64((state ^ number) + np.uint64(0x9E3779B97F4A7C15))
    return state


def key_of(*parts: int) -> int:
    """A 64-bit key from a sequence of integers."""
    return int(keys_of(*parts)[0])


def permute(index: np.ndarray, n: int, key: int, inverse: bool = False) -> np.ndarray:
    """Apply the permutation of [0, n) with the given key, or with `inverse` its inverse, to `index` (int64)."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(key_of(key, r)) for r in range(_ROUNDS)]

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half), x & mask
        if inverse:
            for k in reversed(keys):
                left, right = right ^ (mix64(left + k) & mask), left
        else:
            for k in keys:
                left, right = right, left ^ (mix64(right + k) & mask)
        return (left << np.uint64(half)) | right

    with np.errstate(over="ignore"):
        out = network(index.astype(np.uint64))
        while (outside := out >= n).any():  # cycle walking; the network's domain is at most 4 n, so few iterations
            out[outside] = network(out[outside])
    return out.astype(np.int64)


def mixture_pattern(weights: Sequence[float], length: int = PATTERN_LENGTH) -> np.ndarray:
    """The source at each position [length] by error diffusion: the source that lags most behind its fraction."""
    fractions = (np.asarray(weights, np.float64) / np.sum(weights)).tolist()
    counts = [0] * len(fractions)
    pattern = np.empty(length, np.int64)
    for position in range(length):
        lag = [fraction * (position + 1) - count for fraction, count in zip(fractions, counts, strict=True)]
        source = lag.index(max(lag))
        counts[source] += 1
        pattern[position] = source
    return pattern


@dataclass(frozen=True)
class Order:
    """The order of the rows of a training run or a phase.

    Args:
        rows: number of rows of each source.
        weights: relative number of rows of each source; 0 excludes a source.
        seed: seed of the shuffle.
        drawn: number of rows drawn from each source before position 0, so that a phase continues an earlier one.
        shuffled: whether the rows of an epoch are shuffled; else they come in the order of the store.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    drawn: tuple[int, ...] = ()
    shuffled: bool = True
    _pattern: np.ndarray = field(init=False, repr=False, compare=False)
    _rank: np.ndarray = field(init=False, repr=False, compare=False)
    _counts: np.ndarray = field(init=False, repr=False, compare=False)
    _drawn: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.weights) == len(self.drawn or self.rows)
        assert all(n > 0 for n, weight in zip(self.rows, self.weights, strict=True) if weight)
        active = [s for s, weight in enumerate(self.weights) if weight]
        pattern = mixture_pattern(self.weights) if len(active) > 1 else np.array(active, np.int64)
        counts = np.bincount(pattern, minlength=len(self.rows))
        if (counts[active] == 0).any():
            raise UserError(
                f"data: found a source with less than 1 / {PATTERN_LENGTH:,} of the rows, which would never be drawn; "
                "raise its weight or remove it"
            )
        rank = np.zeros_like(pattern)
        for source in active:
            rank[pattern == source] = np.arange(counts[source])
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_rank", rank)
        object.__setattr__(self, "_counts", counts)
        object.__setattr__(self, "_drawn", np.array(self.drawn or [0] * len(self.rows), np.int64))

    def at(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and row number (both int64 [count]) at the positions from `first` on; positions count from 0."""
        block, position = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._pattern))
        source = self._pattern[position]
        drawn = self._drawn[source] + block * self._counts[source] + self._rank[position]  # earlier draws of the source
        row = np.empty_like(drawn)
        for s in np.unique(source):
            of_source = source == s
            epoch, within = np.divmod(drawn[of_source], self.rows[s])
            source_rows = np.empty_like(within)
            for e in np.unique(epoch):
                of_epoch = epoch == e
                source_rows[of_epoch] = self._within_epoch(within[of_epoch], int(s), int(e))
            row[of_source] = source_rows
        return source, row

    def _within_epoch(self, index: np.ndarray, source: int, epoch: int, inverse: bool = False) -> np.ndarray:
        """The rows at places of an epoch of a source; with `inverse` the places of rows."""
        if not self.shuffled:
            return index
        return permute(index, self.rows[source], key_of(self.seed, source, epoch), inverse)

    def drawn_after(self, count: int) -> tuple[int, ...]:
        """Number of rows drawn from each source after `count` positions, including the initial `drawn`."""
        blocks, rest = divmod(count, len(self._pattern))
        partial = np.bincount(self._pattern[:rest], minlength=len(self.rows))
        return tuple(int(n) for n in self._drawn + blocks * self._counts + partial)

    def positions(self, source: int, row: int, end: int) -> list[int]:
        """The positions before `end` at which a row of a source is drawn, in ascending order; the inverse of `at`."""
        rows, first, last = self.rows[source], int(self._drawn[source]), self.drawn_after(end)[source]
        in_pattern = np.flatnonzero(self._pattern == source)
        positions = []
        for epoch in range(first // rows, -(-last // rows)):
            within = self._within_epoch(np.array([row]), source, epoch, inverse=True)
            drawn = epoch * rows + int(within[0])
            if first <= drawn < last:
                block, rank = divmod(drawn - first, len(in_pattern))
                positions.append(block * len(self._pattern) + int(in_pattern[rank]))
        return positions
