"""WordPiece vocabularies: merge the pair that is seen together most often for how often its halves are seen at all.

    score(a, b) = f(ab) / (f(a) f(b))                                  (Schuster and Nakajima 2012; BERT)

The score alone spends a vocabulary on the rarest letters: a pair that occurs once, of letters that occur once, has the
highest score there is. (With 700 tokens of Shakespeare 1.05 bytes a token, BPE 2.33.) So it decides among pairs that
are frequent enough: at first those with an eighth of the commonest pair's count, and half of that whenever none is
left (2.29 bytes a token).

Words are spelled in bytes (GPT-2's letters for them), so there is nothing a vocabulary cannot spell. The library's own
"WordPiece trainer" is not used: it merges by frequency, as BPE does.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

CONTINUES = "##"
"""Marks a piece that goes on with a word."""
FIRST_SHARE = 8


def learn_pieces(
    words: Sequence[str],
    counts: np.ndarray,
    letters: Sequence[str],
    pieces: int,
    floor: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Learn a vocabulary from words with their counts.

    Args:
        words: distinct words over `letters`.
        counts: [len(words)] how often each occurs.
        letters: the alphabet; both forms of each (`a` and `##a`) come first in the vocabulary.
        pieces: size of the vocabulary.
        floor: how often a pair must occur to be looked at; by default what the module's docstring says.
        progress: told how many pieces there are.

    Returns:
        at most `pieces` pieces in the order in which they were made; fewer when every word is one piece. Of equal
        scores the pair with the higher count wins, then the one whose halves are older.
    """
    known = [*letters, *(CONTINUES + letter for letter in letters)]
    ids = {piece: n for n, piece in enumerate(known)}
    state = _Words(words, counts, ids)
    enough = max(1.0, state.most_frequent() / FIRST_SHARE) if floor is None else floor
    while len(known) < pieces:
        pair = state.best(enough)
        if pair is None and enough <= (floor or 1):
            break
        if pair is None:
            enough = max(1.0, enough / 2)
            continue
        piece = known[pair[0]] + known[pair[1]].removeprefix(CONTINUES)
        state.merge(pair, ids.setdefault(piece, len(known)))  # other halves may have made the same piece before
        if ids[piece] == len(known):
            known.append(piece)
        progress(len(known))
    return known


class _Words:
    """Words as pieces, with the counts of pieces and pairs kept up to date."""

    def __init__(self, words: Sequence[str], counts: np.ndarray, ids: dict[str, int]):
        self.words = [[ids[c if n == 0 else CONTINUES + c] for n, c in enumerate(word)] for word in words]
        self.counts = counts.tolist()
        self.frequency = np.zeros(1024 + len(ids), dtype=np.int64)
        self.halves = np.zeros((1024, 2), dtype=np.int64)
        self.together = np.zeros(1024, dtype=np.int64)
        self.numbers: dict[tuple[int, int], int] = {}
        self.places: dict[tuple[int, int], list[int]] = {}
        for number in range(len(self.words)):
            self._count(number, 1)

    def most_frequent(self) -> int:
        return int(self.together.max(initial=0))

    def best(self, enough: float) -> tuple[int, int] | None:
        """The pair with the highest score among those that occur `enough` times."""
        used = len(self.numbers)
        candidates = np.flatnonzero(self.together[:used] >= enough)
        if not len(candidates):
            return None
        halves, together = self.halves[candidates], self.together[candidates]
        score = together / (self.frequency[halves[:, 0]] * self.frequency[halves[:, 1]])
        ties = np.flatnonzero(score == score.max())
        order = np.lexsort((halves[ties, 1], halves[ties, 0], -together[ties]))
        left, right = halves[ties[order[0]]].tolist()
        return left, right

    def merge(self, pair: tuple[int, int], made: int) -> None:
        """Join a pair wherever it occurs."""
        if made >= len(self.frequency):
            self.frequency = np.concatenate((self.frequency, np.zeros_like(self.frequency)))
        for number in sorted(set(self.places.pop(pair))):
            word = self.words[number]
            self._count(number, -1)
            joined: list[int] = []
            for id in word:
                if joined and (joined[-1], id) == pair:
                    joined[-1] = made
                else:
                    joined.append(id)
            self.words[number] = joined
            self._count(number, 1)

    def _count(self, number: int, sign: int) -> None:
        """Count a word in, or out before it changes."""
        word, count = self.words[number], sign * self.counts[number]
        for id in word:
            self.frequency[id] += count
        for pair in itertools.pairwise(word):
            at = self.numbers.get(pair)
            if at is None:
                at = self.numbers[pair] = len(self.numbers)
                if at == len(self.together):
                    self.halves = np.concatenate((self.halves, np.zeros_like(self.halves)))
                    self.together = np.concatenate((self.together, np.zeros_like(self.together)))
                self.halves[at] = pair
            self.together[at] += count
            places = self.places.setdefault(pair, [])
            if sign > 0 and (not places or places[-1] != number):
                places.append(number)
