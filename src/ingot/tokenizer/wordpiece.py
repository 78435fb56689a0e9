"""Trains WordPiece vocabularies: merge the pair with the highest score among the frequent ones.

    score(a, b) = f(ab) / (f(a) f(b))                                  (Schuster and Nakajima 2012; BERT)

The score alone favours rare letters: a pair that occurs once, of letters that occur once, has the maximum score. So
only pairs with a minimum count are candidates. The minimum starts at an eighth of the most frequent pair's count and is
halved whenever no candidate is left (docs/LOG.md).

Words consist of bytes (in GPT-2's letters), so the vocabulary can encode any text. The WordPiece trainer of the
tokenizers library is not used because it merges by frequency, like BPE.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

CONTINUING_PREFIX = "##"
"""Prefix of a piece that is not at the start of a word."""
FIRST_MIN_COUNT_DIVISOR = 8


def learn_pieces(
    words: Sequence[str],
    counts: np.ndarray,
    letters: Sequence[str],
    pieces: int,
    min_count: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Train a vocabulary on words with their counts.

    Args:
        words: distinct words over `letters`.
        counts: count of each word [len(words)].
        letters: the alphabet; both forms of each letter (`a` and `##a`) come first in the vocabulary.
        pieces: size of the vocabulary.
        min_count: fixed minimum count of a pair to merge; by default decreasing as described above.
        progress: called with the current number of pieces.

    Returns:
        At most `pieces` pieces in the order of their merges; fewer if every word is one piece. Ties: the more frequent
        pair, then the pair of older pieces.
    """
    vocabulary = [*letters, *(CONTINUING_PREFIX + letter for letter in letters)]
    ids = {piece: n for n, piece in enumerate(vocabulary)}
    words_as_pieces = _Words(words, counts, ids)
    adaptive = max(1.0, words_as_pieces.max_pair_count() / FIRST_MIN_COUNT_DIVISOR)
    threshold = adaptive if min_count is None else min_count
    while len(vocabulary) < pieces:
        pair = words_as_pieces.best_pair(threshold)
        if pair is None and threshold <= (min_count or 1):
            break
        if pair is None:
            threshold = max(1.0, threshold / 2)
            continue
        piece = vocabulary[pair[0]] + vocabulary[pair[1]].removeprefix(CONTINUING_PREFIX)
        words_as_pieces.merge(pair, ids.setdefault(piece, len(vocabulary)))  # another pair can give the same piece
        if ids[piece] == len(vocabulary):
            vocabulary.append(piece)
        progress(len(vocabulary))
    return vocabulary


class _Words:
    """The words as lists of pieces, with up-to-date counts of pieces and pairs."""

    def __init__(self, words: Sequence[str], counts: np.ndarray, ids: dict[str, int]):
        self.words = [[ids[c if n == 0 else CONTINUING_PREFIX + c] for n, c in enumerate(word)] for word in words]
        self.counts = counts.tolist()
        self.piece_counts = np.zeros(1024 + len(ids), dtype=np.int64)
        self.pairs = np.zeros((1024, 2), dtype=np.int64)
        self.pair_counts = np.zeros(1024, dtype=np.int64)
        self.pair_rows: dict[tuple[int, int], int] = {}
        """Pair -> its row in `pairs` and `pair_counts`."""
        self.words_with: dict[tuple[int, int], list[int]] = {}
        """Pair -> indices of the words that contain it, or did."""
        for index in range(len(self.words)):
            self._count(index, 1)

    def max_pair_count(self) -> int:
        return int(self.pair_counts.max(initial=0))

    def best_pair(self, min_count: float) -> tuple[int, int] | None:
        """The pair with the highest score among those with at least `min_count` occurrences, or None."""
        candidates = np.flatnonzero(self.pair_counts[: len(self.pair_rows)] >= min_count)
        if not len(candidates):
            return None
        pairs, counts = self.pairs[candidates], self.pair_counts[candidates]
        score = counts / (self.piece_counts[pairs[:, 0]] * self.piece_counts[pairs[:, 1]])
        ties = np.flatnonzero(score == score.max())
        order = np.lexsort((pairs[ties, 1], pairs[ties, 0], -counts[ties]))
        left, right = pairs[ties[order[0]]].tolist()
        return left, right

    def merge(self, pair: tuple[int, int], new_id: int) -> None:
        """Replace the pair by `new_id` in all words."""
        if new_id >= len(self.piece_counts):
            self.piece_counts = np.concatenate((self.piece_counts, np.zeros_like(self.piece_counts)))
        for index in sorted(set(self.words_with.pop(pair))):
            word = self.words[index]
            self._count(index, -1)
            merged: list[int] = []
            for id in word:
                if merged and (merged[-1], id) == pair:
                    merged[-1] = new_id
                else:
                    merged.append(id)
            self.words[index] = merged
            self._count(index, 1)

    def _count(self, index: int, sign: int) -> None:
        """Add the pieces and pairs of a word to the counts (sign 1), or remove them before it changes (sign -1)."""
        word, count = self.words[index], sign * self.counts[index]
        for id in word:
            self.piece_counts[id] += count
        for pair in itertools.pairwise(word):
            row = self.pair_rows.get(pair)
            if row is None:
                row = self.pair_rows[pair] = len(self.pair_rows)
                if row == len(self.pair_counts):
                    self.pairs = np.concatenate((self.pairs, np.zeros_like(self.pairs)))
                    self.pair_counts = np.concatenate((self.pair_counts, np.zeros_like(self.pair_counts)))
                self.pairs[row] = pair
            self.pair_counts[row] += count
            indices = self.words_with.setdefault(pair, [])
            if sign > 0 and (not indices or indices[-1] != index):
                indices.append(index)
