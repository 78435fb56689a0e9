"""Textbook BPE and WordPiece, one merge at a time: slow reference implementations for tests and `ingot inspect`.

A word is a tuple of symbols, a corpus a count of words. Each step counts the pairs of adjacent symbols, chooses the
best pair, and merges it everywhere from left to right (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909).

Ties need a rule. `bpe` chooses among equally frequent pairs the one with the highest WordPiece score, then the first in
alphabetical order: "low", "newer" and "wider" give lo, er, er_, low in this order. rustbpe and the tokenizers library
choose the pair of the oldest symbols (`bpe_by_age`).
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
"""The end-of-word marker."""


@dataclass(frozen=True)
class Step:
    """One merge."""

    pairs: dict[Pair, int]
    """Count of each pair of adjacent symbols before the merge, in order of first occurrence."""
    pair: Pair
    """The merged pair."""
    score: Fraction
    """The maximum: the count, or the WordPiece score."""
    tied: list[Pair]
    """All pairs with this score, including the merged one."""
    words: dict[Word, int]
    """The corpus after the merge."""

    @property
    def symbol(self) -> str:
        return "".join(self.pair)


MergeRule = Callable[[Words, Mapping[Pair, int], Sequence[str]], tuple[Fraction, list[Pair]]]
"""(words, pair counts, symbols by age) -> (highest score, pairs with this score; the pair to merge comes first)."""


def words_of(text: str, end: str = END) -> dict[Word, int]:
    """The counts of the blank-separated words as characters plus the marker `end`, in order of appearance."""
    return dict(Counter((*word, end) if end else tuple(word) for word in text.split()))


def symbols_of(words: Words) -> list[str]:
    """The distinct symbols in order of appearance, with `END` last."""
    seen = dict.fromkeys(symbol for word in words for symbol in word)
    marker = [symbol for symbol in seen if symbol == END]
    return [*(symbol for symbol in seen if symbol != END), *marker]


def pair_counts(words: Words) -> dict[Pair, int]:
    """Count of each pair of adjacent symbols."""
    counts: dict[Pair, int] = {}
    for word, times in words.items():
        for pair in itertools.pairwise(word):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def symbol_counts(words: Words) -> Counter[str]:
    """Count of each symbol."""
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for symbol in word:
            counts[symbol] += times
    return counts


def wordpiece_score(pair: int, left: int, right: int) -> Fraction:
    """The exact score f(ab) / (f(a) f(b)) of a pair from the counts of the pair and of its symbols."""
    return Fraction(pair, left * right)


def merge_pair(word: Word, pair: Pair) -> Word:
    """The word with every occurrence of the pair merged, from left to right."""
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


def bpe(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """The most frequent pair; ties: the highest WordPiece score, then alphabetical order."""
    best, counts = max(pairs.values()), symbol_counts(words)
    tied = [pair for pair, count in pairs.items() if count == best]
    return Fraction(best), sorted(tied, key=lambda p: (-wordpiece_score(best, counts[p[0]], counts[p[1]]), p))


def bpe_by_age(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """The most frequent pair; ties: the oldest left symbol, then the oldest right symbol."""
    best, age = max(pairs.values()), {symbol: n for n, symbol in enumerate(symbols)}
    tied = [pair for pair, count in pairs.items() if count == best]
    return Fraction(best), sorted(tied, key=lambda p: (age[p[0]], age[p[1]]))


def wordpiece(words: Words, pairs: Mapping[Pair, int], symbols: Sequence[str]) -> tuple[Fraction, list[Pair]]:
    """The pair with the highest WordPiece score; ties: the most frequent pair, then as `bpe_by_age`."""
    counts, age = symbol_counts(words), {symbol: n for n, symbol in enumerate(symbols)}
    scores = {pair: wordpiece_score(count, counts[pair[0]], counts[pair[1]]) for pair, count in pairs.items()}
    best = max(scores.values())
    tied = [pair for pair, score in scores.items() if score == best]
    return best, sorted(tied, key=lambda p: (-pairs[p], age[p[0]], age[p[1]]))


def steps(words: Words, rule: MergeRule = bpe, symbols: Iterable[str] = ()) -> Iterator[Step]:
    """Yield merges until every word is one symbol.

    Args:
        words: the corpus.
        rule: chooses the pair to merge.
        symbols: the alphabet by age; by default in order of appearance.
    """
    by_age = list(symbols) or symbols_of(words)
    current = dict(words)
    while pairs := pair_counts(current):
        score, tied = rule(current, pairs, by_age)
        merged_words: dict[Word, int] = {}
        for word, times in current.items():
            merged = merge_pair(word, tied[0])
            merged_words[merged] = merged_words.get(merged, 0) + times
        current = merged_words
        step = Step(pairs, tied[0], score, tied, current)
        if step.symbol not in by_age:
            by_age.append(step.symbol)
        yield step


def encode_bpe(word: Word, merges: Sequence[Pair]) -> Word:
    """Apply the merges to a word: repeatedly the earliest one that is applicable."""
    rank = {pair: n for n, pair in enumerate(merges)}
    while applicable := [pair for pair in itertools.pairwise(word) if pair in rank]:
        word = merge_pair(word, min(applicable, key=rank.__getitem__))
    return word


def encode_wordpiece(word: str, pieces: Iterable[str], continuing_prefix: str = "##") -> list[str] | None:
    """Split a word greedily into its longest pieces from the left; None if a letter is in no piece."""
    vocabulary, split, at = set(pieces), [], 0
    while at < len(word):
        prefix = continuing_prefix if at else ""
        ends = (end for end in range(len(word), at, -1) if prefix + word[at:end] in vocabulary)
        if (end := next(ends, None)) is None:
            return None
        split.append(prefix + word[at:end])
        at = end
    return split
