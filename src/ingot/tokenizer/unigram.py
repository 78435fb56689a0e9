"""Unigram vocabularies: pieces with probabilities, learned from too many by dropping those that are missed least.

    p(word) = sum over segmentations of the product of p(piece)       (Kudo 2018, https://arxiv.org/abs/1804.10959)

The seeds are the substrings of words with the most letters in the text. Probabilities come from expectation
maximisation over all segmentations; then a quarter of the pieces goes, those whose next best spelling costs the text
the least likelihood, and so on until the vocabulary has its size. Single letters stay, so that every word has a
segmentation.

The library's trainer is not used: it takes its seeds from the list of distinct words, in which ` =` is seen as often as
a misspelling (at 2,048 tokens of Python 3.07 bytes a token, ours 3.39), and it sums in the order of a hash table, so
that two runs differ. Here all sums are in one order and in double precision.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

LONGEST = 16
"""Letters of a piece at most."""
SEEDS = 8
"""Substrings to begin with for every piece that is wanted."""
KEPT = 0.75
ROUNDS = 2
"""Of expectation maximisation, between two prunings and at the end."""
LOOPS = 1 + math.ceil(math.log(SEEDS) / -math.log(KEPT))
"""How often all words are gone through at most."""
_CHUNK = 1 << 21
"""Places (words x letters x piece lengths) that are worked on at once."""
Lattice = tuple[np.ndarray, np.ndarray]
"""Words of one length as [n, length, k]: the piece of k + 1 letters that begins there, or -1; and their counts [n]."""


def learn(
    words: Sequence[str],
    counts: np.ndarray,
    letters: Sequence[str],
    size: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[str], np.ndarray]:
    """Learn a vocabulary from words with their counts.

    Args:
        words: distinct words over `letters`.
        counts: [len(words)] how often each occurs.
        letters: always part of the vocabulary.
        size: pieces wanted.
        progress: called after each of at most `LOOPS` passes.

    Returns:
        at most `size` pieces, the likeliest first, and their log-probabilities; fewer where no more substrings occur
        twice.
    """
    pieces = seeds(words, counts, letters, SEEDS * size)
    ids = {piece: n for n, piece in enumerate(pieces)}
    lattices, own = list(_lattices(words, counts, ids)), list(_lattices(pieces, np.arange(len(pieces)), ids))
    kept = np.ones(len(pieces), dtype=bool)
    total = np.zeros(len(pieces))
    for lattice, count in lattices:  # at first every place where a piece fits counts
        total += _by_piece(lattice, count[:, None, None], len(pieces))
    while True:
        for _ in range(ROUNDS):
            total = expected(lattices, logp_of(total, kept))
        progress()
        if kept.sum() <= size:
            break
        logp = logp_of(total, kept)
        loose = np.flatnonzero(kept)[len(letters) :]
        missed = total[loose] * (logp - second_best(own, logp))[loose]
        most = max(size, int(KEPT * kept.sum())) - len(letters)
        kept[loose[np.argsort(-missed, kind="stable")[most:]]] = False
    logp = logp_of(total, kept)
    ranked = sorted(np.flatnonzero(kept).tolist(), key=lambda n: (-logp[n], pieces[n]))
    return [pieces[n] for n in ranked], logp[ranked]


def seeds(words: Sequence[str], counts: np.ndarray, letters: Sequence[str], most: int) -> list[str]:
    """The letters, then the substrings of at least two letters that hold most letters of the text, at most `most`."""
    found: Counter[str] = Counter()
    for word, count in zip(words, counts.tolist(), strict=True):
        for start in range(len(word) - 1):
            for stop in range(start + 2, min(len(word), start + LONGEST) + 1):
                found[word[start:stop]] += count
    repeated = ((piece, count) for piece, count in found.items() if count > 1)
    ranked = sorted(repeated, key=lambda item: (-item[1] * len(item[0]), item[0]))
    return [*letters, *(piece for piece, _ in ranked[: max(0, most - len(letters))])]


def logp_of(total: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Log shares of the kept pieces, -inf of the others; one that is hardly needed keeps half a use."""
    floored = np.where(kept, np.maximum(total, 0.5), 0.0)
    with np.errstate(divide="ignore"):
        return np.log(floored / floored.sum())


def expected(lattices: Sequence[Lattice], logp: np.ndarray) -> np.ndarray:
    """How often each piece is used, over all segmentations of all words."""
    total = np.zeros(len(logp))
    for lattice, count in lattices:
        total += _by_piece(lattice, _used(lattice, logp) * count[:, None, None], len(logp))
    return total


def second_best(own: Sequence[Lattice], logp: np.ndarray) -> np.ndarray:
    """The log-probability of the likeliest spelling of each piece by others; -inf for a single letter."""
    found = np.full(len(logp), -np.inf)
    for lattice, numbers in own:
        n, length, widest = lattice.shape
        edge = np.where(lattice >= 0, logp[lattice], -np.inf)
        edge[:, 0, length - 1] = -np.inf
        best = np.full((n, length + 1), -np.inf)
        best[:, 0] = 0.0
        for end in range(1, length + 1):
            into = [best[:, end - k] + edge[:, end - k, k - 1] for k in range(1, min(end, widest) + 1)]
            best[:, end] = np.max(into, axis=0)
        found[numbers.astype(np.int64)] = best[:, length]
    return found


def _lattices(words: Sequence[str], counts: np.ndarray, ids: dict[str, int]) -> Iterator[Lattice]:
    longest = max(map(len, ids))
    by_length: dict[int, list[int]] = {}
    for number, word in enumerate(words):
        by_length.setdefault(len(word), []).append(number)
    for length, numbers in sorted(by_length.items()):
        widest = min(length, longest)
        size = max(1, _CHUNK // (length * widest))
        for start in range(0, len(numbers), size):
            chosen = numbers[start : start + size]
            table = np.full((len(chosen), length, widest), -1, dtype=np.int32)
            for row, number in enumerate(chosen):
                word = words[number]
                for at in range(length):
                    for k in range(min(widest, length - at)):
                        table[row, at, k] = ids.get(word[at : at + k + 1], -1)
            yield table, counts[chosen].astype(np.float64)


def _used(lattice: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """How often each place is used in a word, over its segmentations: forward and backward sums."""
    n, length, widest = lattice.shape
    edge = np.where(lattice >= 0, logp[lattice], -np.inf)
    forward, backward = np.full((n, length + 1), -np.inf), np.full((n, length + 1), -np.inf)
    forward[:, 0] = backward[:, length] = 0.0
    for end in range(1, length + 1):
        into = [forward[:, end - k] + edge[:, end - k, k - 1] for k in range(1, min(end, widest) + 1)]
        forward[:, end] = np.logaddexp.reduce(into, axis=0)
    for start in range(length - 1, -1, -1):
        out = [backward[:, start + k] + edge[:, start, k - 1] for k in range(1, min(length - start, widest) + 1)]
        backward[:, start] = np.logaddexp.reduce(out, axis=0)
    used = np.zeros(lattice.shape)
    for k in range(1, widest + 1):
        places = np.arange(length - k + 1)
        log_used = forward[:, places] + edge[:, places, k - 1] + backward[:, places + k] - forward[:, length:]
        used[:, places, k - 1] = np.exp(log_used)
    return used


def _by_piece(lattice: np.ndarray, weight: np.ndarray, pieces: int) -> np.ndarray:
    fits = lattice >= 0
    return np.bincount(lattice[fits], weights=np.broadcast_to(weight, lattice.shape)[fits], minlength=pieces)
