"""BPE and WordPiece as they are told, one merge at a time: slow, small, and what the fast ones are held against.

A word is a tuple of symbols, a corpus a count of words. Each step counts the pairs of neighbours, takes the best, and
joins it everywhere from left to right (Sennrich, Haddow and Birch 2016, https://arxiv.org/abs/1508.07909).

Ties need a rule, and libraries differ. The telling here (`together`) takes, of pairs that are equally frequent, the one
whose halves are seen least apart (the WordPiece score), then the first by its letters: "low", "newer" and "wider" then
give lo, er, er_, low in that order. rustbpe and the tokenizers library take the pair of the oldest symbols (`oldest`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Word = tuple[str, ...]
Pair = tuple[str, str]
Words = Mapping[Word, int]
END = "_"
"""Stands at the end of every word, so that a symbol knows whether it ends one."""


@dataclass(frozen=True)
class Step:
    """One merge."""

    pairs: dict[Pair, int]
    """How often each pair of neighbours occurs, in the order in which they are first seen."""
    pair: Pair
    score: Fraction
    """What was maximal: the count, or WordPiece's score."""
    tied: list[Pair]
    """The pairs with that score, the chosen one among them."""
    words: dict[Word, int]
    """The corpus after the merge."""

    @property
    def symbol(self) -> str:
        return "".join(self.pair)


Choose = Callable[[Words, Mapping[Pair, int], Sequence[str]], tuple[Fraction, list[Pair]]]
"""(words, pairs, symbols by age) -> the highest score and the pairs that have it, the one to merge first."""


def words_of(text: str, end: str = END) -> dict[Word, int]:
    """The words of a text, cut at blanks, as characters and an end-of-word marker, in order of appearance."""
    return dict(Counter((*word, end) if end else tuple(word) for word in text.split()))


def symbols_of(words: Words) -> list[str]:
    """The distinct symbols in order of appearance, a word's last one (the end marker) at the very end."""
    seen = dict.fromkeys(symbol for word in words for symbol in word)
    marker = [symbol for symbol in seen if symbol == END]
    return [*(symbol for symbol in seen if symbol != END), *marker]


def pair_counts(words: Words) -> dict[Pair, int]:
    """How often each pair of neighbouring symbols occurs."""
    counts: dict[Pair, int] = {}
    for word, times in words.items():
        for pair in itertools.pairwise(word):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def symbol_counts(words: Words) -> Counter[str]:
    """How often each symbol occurs."""
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for symbol in word:
            counts[symbol] += times
    return counts


def wordpiece_score(together: int, left: int, right: int) -> Fraction:
    """f(ab) / (f(a) f(b)), exactly."""
    return Fraction(together, left * right)


def merged(word: Word, pair: Pair) -> Word:
    """The word with the pair joined wherever it occurs, from left to right."""
    out: list[str] = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            out.append("".join(pair))
            at += 2
        else:
            out.append(word[at])
            at += 1
    return tuple(out)


def together(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """BPE: the most frequent pair; of equal ones that with the highest WordPiece score, then the first by letters."""
    best, alone = max(pairs.values()), symbol_counts(words)
    tied = [pair for pair, count in pairs.items() if count == best]
    return Fraction(best), sorted(tied, key=lambda p: (-wordpiece_score(best, alone[p[0]], alone[p[1]]), p))


def oldest(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """BPE: the most frequent pair; of equal ones that of the oldest left symbol, then of the oldest right one."""
    best, age = max(pairs.values()), {symbol: n for n, symbol in enumerate(symbols)}
    tied = [pair for pair, count in pairs.items() if count == best]
    return Fraction(best), sorted(tied, key=lambda p: (age[p[0]], age[p[1]]))


def wordpiece(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """WordPiece: the highest score; of equal ones the most frequent pair, then as `oldest`."""
    alone, age = symbol_counts(words), {symbol: n for n, symbol in enumerate(symbols)}
    scores = {pair: wordpiece_score(count, alone[pair[0]], alone[pair[1]]) for pair, count in pairs.items()}
    best = max(scores.values())
    tied = [pair for pair, score in scores.items() if score == best]
    return best, sorted(tied, key=lambda p: (-pairs[p], age[p[0]], age[p[1]]))


def steps(words: Words, choose: Choose = together, symbols: Iterable[str] = ()) -> Iterator[Step]:
    """Merges until every word is one symbol.

    Args:
        words: a corpus.
        choose: the rule.
        symbols: the alphabet by age, where it is not the order of appearance.
    """
    known = list(symbols) or symbols_of(words)
    now = dict(words)
    while pairs := pair_counts(now):
        score, tied = choose(now, pairs, known)
        after: dict[Word, int] = {}
        for word, times in now.items():
            joined = merged(word, tied[0])
            after[joined] = after.get(joined, 0) + times
        now = after
        step = Step(pairs, tied[0], score, tied, now)
        if step.symbol not in known:
            known.append(step.symbol)
        yield step


def encode_bpe(word: Word, merges: Sequence[Pair]) -> Word:
    """A word cut by merges: the earliest merge that applies is made, until none does."""
    rank = {pair: n for n, pair in enumerate(merges)}
    while applicable := [pair for pair in itertools.pairwise(word) if pair in rank]:
        word = merged(word, min(applicable, key=rank.__getitem__))
    return word


def encode_wordpiece(word: str, pieces: Iterable[str], continues: str = "##") -> list[str] | None:
    """A word cut greedily into its longest pieces from the left; None where a letter is in no piece."""
    known, cut, at = set(pieces), [], 0
    while at < len(word):
        mark = continues if at else ""
        ends = (end for end in range(len(word), at, -1) if mark + word[at:end] in known)
        if (end := next(ends, None)) is None:
            return None
        cut.append(mark + word[at:end])
        at = end
    return cut
