"""Scores of a Unigram vocabulary: log-probabilities of its pieces, by expectation maximisation over all segmentations.

    p(word) = sum over segmentations of the product of p(piece)       (Kudo 2018, https://arxiv.org/abs/1804.10959)

The library's trainer chooses the pieces (it starts from frequent substrings and drops those that the likelihood misses
least), but it sums in the order of a hash table, so its scores differ from run to run in their sixth digit, and a
vocabulary file with them. Ours are summed in one order, in double precision.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

ROUNDS = 4
_CHUNK = 1 << 21
"""Places (words x letters x piece lengths) that are worked on at once."""


def scores(
    pieces: Sequence[str],
    words: Sequence[str],
    counts: np.ndarray,
    rounds: int = ROUNDS,
    progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Log-probabilities [len(pieces)] that make words likely.

    Args:
        pieces: the vocabulary; every letter of `words` is one of them.
        words, counts: distinct words and how often each occurs.
        rounds: of expectation maximisation.
        progress: told how many words were worked on.
    """
    ids = {piece: n for n, piece in enumerate(pieces)}
    longest = max(map(len, pieces))
    lattices = list(_lattices(words, counts, ids, longest))
    total = np.zeros(len(pieces))
    for lattice, count in lattices:  # at first every place where a piece fits counts
        total += _by_piece(lattice, np.broadcast_to(count[:, None, None], lattice.shape), len(pieces))
    for _ in range(rounds):
        logp = _normalised(total)
        total = np.zeros(len(pieces))
        for lattice, count in lattices:
            total += _by_piece(lattice, _expected(lattice, logp) * count[:, None, None], len(pieces))
            progress(len(lattice))
    return _normalised(total)


def _lattices(
    words: Sequence[str], counts: np.ndarray, ids: dict[str, int], longest: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Words of one length as [n, length, k]: the piece of k + 1 letters that begins there, or -1; with their counts."""
    by_length: dict[int, list[int]] = {}
    for number, word in enumerate(words):
        by_length.setdefault(len(word), []).append(number)
    for length, numbers in sorted(by_length.items()):
        widest = min(length, longest)
        size = max(1, _CHUNK // (length * widest))
        for start in range(0, len(numbers), size):
            chosen = numbers[start : start + size]
            table = [
                [[ids.get(word[at : at + k], -1) if at + k <= length else -1 for k in range(1, widest + 1)]
                 for at in range(length)]
                for word in (words[n] for n in chosen)
            ]  # fmt: skip
            yield np.array(table, dtype=np.int32), counts[chosen].astype(np.float64)


def _expected(lattice: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """How often each place is used, over all segmentations: forward and backward sums."""
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
    return np.bincount(lattice[fits], weights=weight[fits], minlength=pieces)


def _normalised(total: np.ndarray) -> np.ndarray:
    """Log shares; a piece that is hardly needed keeps half a use, so that no text makes it impossible."""
    kept = np.maximum(total, 0.5)
    return np.log(kept / kept.sum())
