"""Which rows come first, second, ... in training: a pure function of (seed, place), with no state to save or lose.

Shuffling is a keyed permutation of row numbers (a Feistel network with cycle walking): O(1) memory at any length, so
row number `k` of the shuffled epoch is computed, never looked up. Mixing spreads the sources by error diffusion, so
that any window of rows has the asked shares to within two rows of each source. How the places are cut into steps is
another matter (`data/batch_size.py`), and so is what follows what (`stages/training/timeline.py`).

Rejected: a permutation file (O(rows) memory, and its own resume state) and sampling sources at random (a window of
100 rows then misses a 5 % share by +-2 rows, and an epoch repeats some rows before it has shown others).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.core.errors import UserError

_ROUNDS = 6
BLOCK = 10_000
"""Length of the repeating mixture pattern: shares are exact to 1 / BLOCK."""


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of uint64 that scatters every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys_of(*parts: int | np.ndarray) -> np.ndarray:
    """64-bit keys from integers or arrays of them (int64, broadcast together), order-sensitive."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            number = np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)
            state = mix64((state ^ number) + np.uint64(0x9E3779B97F4A7C15))
    return state


def key_of(*parts: int) -> int:
    """One 64-bit key from integers."""
    return int(keys_of(*parts)[0])


def permute(index: np.ndarray, n: int, key: int, inverse: bool = False) -> np.ndarray:
    """Where each of `index` (int64, values in [0, n)) goes under the permutation of [0, n) that `key` names.

    With `inverse`, where it came from: each round of the network undoes itself when the rounds run backwards.
    """
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
        while (outside := out >= n).any():  # cycle walking: the domain is at most 4 n, so few rounds
            out[outside] = network(out[outside])
    return out.astype(np.int64)


def spread(shares: Sequence[float], length: int = BLOCK) -> np.ndarray:
    """Source of each of `length` places by error diffusion: at each place the source furthest behind its share."""
    share = (np.asarray(shares, np.float64) / np.sum(shares)).tolist()
    counts = [0] * len(share)
    out = np.empty(length, np.int64)
    for place in range(length):
        behind = [part * (place + 1) - count for part, count in zip(share, counts, strict=True)]
        chosen = behind.index(max(behind))
        counts[chosen] += 1
        out[place] = chosen
    return out


@dataclass(frozen=True)
class Order:
    """The order of the rows of a run, or of one phase of it.

    Args:
        rows: number of rows of each source.
        shares: share of rows of each source in every window of places (any positive scale; 0: not in this phase).
        seed: names the shuffle.
        drawn: how often each source was drawn before the first place, so that a phase goes on where another stopped.
    """

    rows: tuple[int, ...]
    shares: tuple[float, ...]
    seed: int
    drawn: tuple[int, ...] = ()
    _pattern: np.ndarray = field(init=False, repr=False, compare=False)
    _rank: np.ndarray = field(init=False, repr=False, compare=False)
    _counts: np.ndarray = field(init=False, repr=False, compare=False)
    _drawn: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.shares) == len(self.drawn or self.rows)
        assert all(n > 0 for n, share in zip(self.rows, self.shares, strict=True) if share)
        alone = [s for s, share in enumerate(self.shares) if share]
        pattern = spread(self.shares) if len(alone) > 1 else np.array(alone, np.int64)
        counts = np.bincount(pattern, minlength=len(self.rows))
        if (counts[alone] == 0).any():
            raise UserError(
                f"data: a share is below 1 in {BLOCK}, so its source would never be drawn; raise it or drop it"
            )
        rank = np.zeros_like(pattern)
        for source in alone:
            rank[pattern == source] = np.arange(counts[source])
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_rank", rank)
        object.__setattr__(self, "_counts", counts)
        object.__setattr__(self, "_drawn", np.array(self.drawn or [0] * len(self.rows), np.int64))

    def at(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and row number (both int64, shape (count,)) of `count` places from the 0-based place `first` on."""
        block, place = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._pattern))
        source = self._pattern[place]
        drawn = self._drawn[source] + block * self._counts[source] + self._rank[place]  # how often before this place
        row = np.empty_like(drawn)
        for s in np.unique(source):
            here = source == s
            epoch, within = np.divmod(drawn[here], self.rows[s])
            out = np.empty_like(within)
            for e in np.unique(epoch):
                now = epoch == e
                out[now] = permute(within[now], self.rows[s], key_of(self.seed, int(s), int(e)))
            row[here] = out
        return source, row

    def drawn_after(self, places: int) -> tuple[int, ...]:
        """How often each source has been drawn in all, `drawn` included, after so many places."""
        blocks, rest = divmod(places, len(self._pattern))
        begun = np.bincount(self._pattern[:rest], minlength=len(self.rows))
        return tuple(int(n) for n in self._drawn + blocks * self._counts + begun)

    def places(self, source: int, row: int, end: int) -> list[int]:
        """The 0-based places before `end` at which a row of a source is drawn, first to last: `at` backwards."""
        rows, first, last = self.rows[source], int(self._drawn[source]), self.drawn_after(end)[source]
        own = np.flatnonzero(self._pattern == source)
        found = []
        for epoch in range(first // rows, -(-last // rows)):
            within = permute(np.array([row]), rows, key_of(self.seed, source, epoch), inverse=True)
            drawn = epoch * rows + int(within[0])
            if first <= drawn < last:
                block, rank = divmod(drawn - first, len(own))
                found.append(block * len(self._pattern) + int(own[rank]))
        return found
