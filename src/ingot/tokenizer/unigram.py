"""Trains Unigram vocabularies: pieces with probabilities, pruned from a larger set of seeds.

    p(word) = sum over segmentations of the product of p(piece)       (Kudo 2018, https://arxiv.org/abs/1804.10959)

The seeds are the frequent substrings of words. Expectation maximisation over all segmentations gives the probabilities.
Then a quarter of the pieces is dropped, those whose best alternative segmentation costs the least likelihood, until the
vocabulary has the wanted size. Single letters are never dropped, so every word has a segmentation.

The trainer of the tokenizers library is not used: it counts seeds in the list of distinct words, without their
frequencies, and it sums in the order of a hash table, so that its result varies between runs (docs/LOG.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

MAX_PIECE_LENGTH = 16
"""Maximum number of letters of a piece."""
SEEDS_PER_PIECE = 8
"""Number of seeds relative to the size of the vocabulary."""
KEEP_FRACTION = 0.75
"""Fraction of the pieces that survives a pruning."""
EM_STEPS = 2
"""Steps of expectation maximisation per pass."""
MAX_PASSES = 1 + math.ceil(math.log(SEEDS_PER_PIECE) / -math.log(KEEP_FRACTION))
"""Maximum number of passes: expectation maximisation, then a pruning in all but the last."""
_CHUNK_CELLS = 1 << 21
"""Maximum number of cells (words x letters x piece lengths) of a lattice."""
Lattice = tuple[np.ndarray, np.ndarray]
"""The segmentations of words of one length: [n, length, k] holds the index of the piece of k + 1 letters that starts at
this letter of the word, or -1; and the words' counts [n]."""


def learn(
    words: Sequence[str],
    counts: np.ndarray,
    letters: Sequence[str],
    size: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[str], np.ndarray]:
    """Train a vocabulary on words with their counts.

    Args:
        words: distinct words over `letters`.
        counts: count of each word [len(words)].
        letters: the alphabet, which is part of the vocabulary.
        size: number of pieces.
        progress: called after each of at most `MAX_PASSES` passes.

    Returns:
        At most `size` pieces in order of descending probability, and their log-probabilities. There are fewer if too
        few substrings occur twice.
    """
    pieces = seed_pieces(words, counts, letters, SEEDS_PER_PIECE * size)
    ids = {piece: n for n, piece in enumerate(pieces)}
    lattices = list(_lattices(words, counts, ids))
    piece_lattices = list(_lattices(pieces, np.arange(len(pieces)), ids))
    active = np.ones(len(pieces), dtype=bool)
    uses = np.zeros(len(pieces))
    for lattice, count in lattices:  # initially every occurrence of a piece counts as a use
        uses += _sum_by_piece(lattice, count[:, None, None], len(pieces))
    while True:
        for _ in range(EM_STEPS):
            uses = expected_uses(lattices, log_probabilities(uses, active))
        progress()
        if active.sum() <= size:
            break
        logp = log_probabilities(uses, active)
        removable = np.flatnonzero(active)[len(letters) :]
        loss = uses[removable] * (logp - best_alternative(piece_lattices, logp))[removable]
        keep = max(size, int(KEEP_FRACTION * active.sum())) - len(letters)
        active[removable[np.argsort(-loss, kind="stable")[keep:]]] = False
    logp = log_probabilities(uses, active)
    ranked = sorted(np.flatnonzero(active).tolist(), key=lambda n: (-logp[n], pieces[n]))
    return [pieces[n] for n in ranked], logp[ranked]


def seed_pieces(words: Sequence[str], counts: np.ndarray, letters: Sequence[str], max_pieces: int) -> list[str]:
    """The letters, then the substrings of two or more letters, sorted by count x length; at most `max_pieces`."""
    substrings: Counter[str] = Counter()
    for word, count in zip(words, counts.tolist(), strict=True):
        for start in range(len(word) - 1):
            for stop in range(start + 2, min(len(word), start + MAX_PIECE_LENGTH) + 1):
                substrings[word[start:stop]] += count
    repeated = ((piece, count) for piece, count in substrings.items() if count > 1)
    ranked = sorted(repeated, key=lambda item: (-item[1] * len(item[0]), item[0]))
    return [*letters, *(piece for piece, _ in ranked[: max(0, max_pieces - len(letters))])]


def log_probabilities(uses: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Log-probabilities of the active pieces, with at least half a use each; -inf for the others."""
    floored = np.where(active, np.maximum(uses, 0.5), 0.0)
    with np.errstate(divide="ignore"):
        return np.log(floored / floored.sum())


def expected_uses(lattices: Sequence[Lattice], logp: np.ndarray) -> np.ndarray:
    """Expected number of uses of each piece over all segmentations of all words."""
    uses = np.zeros(len(logp))
    for lattice, count in lattices:
        uses += _sum_by_piece(lattice, _posterior(lattice, logp) * count[:, None, None], len(logp))
    return uses


def best_alternative(piece_lattices: Sequence[Lattice], logp: np.ndarray) -> np.ndarray:
    """Log-probability of the best segmentation of each piece into other pieces; -inf for a single letter.

    Args:
        piece_lattices: the lattices of the pieces themselves; their "counts" are the indices of the pieces.
        logp: log-probability of each piece.
    """
    alternative = np.full(len(logp), -np.inf)
    for lattice, indices in piece_lattices:
        n, length, widest = lattice.shape
        edge = np.where(lattice >= 0, logp[lattice], -np.inf)
        edge[:, 0, length - 1] = -np.inf  # excludes the piece itself
        best = np.full((n, length + 1), -np.inf)
        best[:, 0] = 0.0
        for end in range(1, length + 1):
            into = [best[:, end - k] + edge[:, end - k, k - 1] for k in range(1, min(end, widest) + 1)]
            best[:, end] = np.max(into, axis=0)
        alternative[indices.astype(np.int64)] = best[:, length]
    return alternative


def _lattices(words: Sequence[str], counts: np.ndarray, ids: dict[str, int]) -> Iterator[Lattice]:
    longest = max(map(len, ids))
    by_length: dict[int, list[int]] = {}
    for number, word in enumerate(words):
        by_length.setdefault(len(word), []).append(number)
    for length, numbers in sorted(by_length.items()):
        widest = min(length, longest)
        size = max(1, _CHUNK_CELLS // (length * widest))
        for start in range(0, len(numbers), size):
            chunk = numbers[start : start + size]
            table = np.full((len(chunk), length, widest), -1, dtype=np.int32)
            for row, number in enumerate(chunk):
                word = words[number]
                for at in range(length):
                    for k in range(min(widest, length - at)):
                        table[row, at, k] = ids.get(word[at : at + k + 1], -1)
            yield table, counts[chunk].astype(np.float64)


def _posterior(lattice: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """Probability that a segmentation of the word uses each cell, by the forward-backward algorithm."""
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
    posterior = np.zeros(lattice.shape)
    for k in range(1, widest + 1):
        starts = np.arange(length - k + 1)
        log_posterior = forward[:, starts] + edge[:, starts, k - 1] + backward[:, starts + k] - forward[:, length:]
        posterior[:, starts, k - 1] = np.exp(log_posterior)
    return posterior


def _sum_by_piece(lattice: np.ndarray, weight: np.ndarray, pieces: int) -> np.ndarray:
    cells = lattice >= 0
    return np.bincount(lattice[cells], weights=np.broadcast_to(weight, lattice.shape)[cells], minlength=pieces)
