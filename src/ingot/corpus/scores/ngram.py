"""A language model of words by counts, which measures how unusual a document is.

The probability of a word after the one or two before it, with Witten-Bell smoothing (Witten and Bell 1991, IEEE
Transactions on Information Theory 37, 1085-1094):

    P(w | h) = (count(h w) + types(h) P(w | h')) / (count(h) + types(h))

where types(h) is the number of different words seen after h, and h' is h without its first word. Below single words is
a model of the same form that spells a word byte by byte, so every word has a probability, and all add up to 1. Words
are in lower case and without punctuation, as in CCNet (Wenzek et al. 2020, arXiv:1911.00359); Chinese and Japanese
characters are words.

Two measures of a document, both NaN without words:

    perplexity  -log2 of the probability of its words, divided by their bytes (with one blank each): bits per byte,
                which compare between documents of long and short words. High for what is unlike the examples: other
                subjects, other languages, noise
    order       how many of these bits the words before save, as bits per word: mean log2 P(w | h) / P(w). A rare
                subject costs both terms the same, so this tells sentences from words without order

Shapes: P words (or bytes of words), N documents, G different n-grams.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl

from ingot.corpus.minhash import split_words
from ingot.corpus.pieces import BASE, Pieces, chunks, hashes, mix, runs
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.scores.settings import Measure

WORDS, BYTES = 3, 5
"""Longest n-grams of words, and of bytes within a word."""
_BEGIN, _END = 0, 257
"""Signs before and after the bytes 1 .. 256 of a word."""
_SIGN_HASHES = mix(np.arange(1, 259, dtype=np.uint64) * np.uint64(BASE))


class Table(NamedTuple):
    """The n-grams of one length."""

    grams: np.ndarray
    """Hashes of the n-grams, G uint64, sorted."""
    counts: np.ndarray
    """Their counts, G uint32."""
    contexts: np.ndarray
    """Hashes of what stands before their last piece, uint64, sorted."""
    totals: np.ndarray
    """The sum of the counts after each context, uint32."""
    types: np.ndarray
    """The number of n-grams after each context, uint32."""

    def look_up(self, grams: np.ndarray, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count of each n-gram, and total and types of its context; 0 where it was not seen."""
        totals, types = (_at(self.contexts, column, contexts) for column in (self.totals, self.types))
        return _at(self.grams, self.counts, grams), totals, types


def _at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if not len(keys):
        return np.zeros(len(wanted), values.dtype)
    distinct, inverse = np.unique(wanted, return_inverse=True)  # sorted keys are found several times faster
    at = np.minimum(np.searchsorted(keys, distinct), len(keys) - 1)
    return np.where(keys[at] == distinct, values[at], 0)[inverse]


class Counts:
    """Witten-Bell smoothed n-grams of pieces: of words in texts, or of bytes in words."""

    def __init__(self, tables: list[Table]):
        self.tables = tables

    @classmethod
    def of(cls, piece_hashes: np.ndarray, pieces: Pieces, length: int, least: int = 1) -> "Counts":
        """Count n-grams of 1 to `length` pieces.

        Args:
            piece_hashes: a hash of each piece, P uint64.
            pieces: the pieces of each text.
            length: of the longest n-grams.
            least: count below which the longest n-grams are forgotten.
        """
        tables = []
        for n in range(1, length + 1):
            at, keys = runs(piece_hashes, pieces, n)
            grams, first, counts = np.unique(keys, return_index=True, return_counts=True)
            before = _contexts(piece_hashes, pieces, n, at[first])
            if n == length:
                grams, counts, before = (column[counts >= least] for column in (grams, counts, before))
            contexts, of = np.unique(before, return_inverse=True)
            totals, types = np.bincount(of, counts, len(contexts)), np.bincount(of, minlength=len(contexts))
            tables.append(Table(grams, _u32(counts), contexts, _u32(totals), _u32(types)))
        return cls(tables)

    def log_probabilities(self, piece_hashes: np.ndarray, pieces: Pieces, base_P: np.ndarray) -> np.ndarray:
        """ln of the probability of each piece after those before it in its text, P float64.

        Args:
            piece_hashes, pieces: as in `of`.
            base_P: ln of the probability of each piece without any count.
        """
        out = base_P.copy()
        for n, table in enumerate(self.tables, 1):
            at, keys = runs(piece_hashes, pieces, n)
            count, total, types = table.look_up(keys, _contexts(piece_hashes, pieces, n, at))
            seen = total > 0
            last, count, total, types = at[seen] + n - 1, count[seen], total[seen], types[seen].astype(np.float64)
            with np.errstate(divide="ignore"):
                shared = np.logaddexp(np.log(count), np.log(types) + out[last])
            out[last] = shared - np.log(total + types)
        return out

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return {
            f"{name}.{n}.{field}": column
            for n, table in enumerate(self.tables, 1)
            for field, column in table._asdict().items()
        }

    @classmethod
    def read(cls, tensors: dict[str, Any], name: str, length: int) -> "Counts":
        return cls([Table(*(tensors[f"{name}.{n}.{field}"] for field in Table._fields)) for n in range(1, length + 1)])


def _u32(column: np.ndarray) -> np.ndarray:
    return column.astype(np.uint32)


def _contexts(piece_hashes: np.ndarray, pieces: Pieces, n: int, at: np.ndarray) -> np.ndarray:
    """Hashes of the n - 1 pieces from each of some pieces on, which a text has; 0 for n = 1."""
    if n == 1:
        return np.zeros(len(at), np.uint64)
    begins, keys = runs(piece_hashes, pieces, n - 1)
    return keys[np.searchsorted(begins, at)]


class NgramModel:
    """A measure of documents by counts of n-grams."""

    def __init__(self, words: Counts, spelling: Counts, measure: Measure = "perplexity"):
        self.words, self.spelling, self.measure = words, spelling, measure

    @property
    def higher_is_better(self) -> bool:
        return self.measure == "order"

    def scores(self, texts: pl.Series) -> np.ndarray:
        """The measure of each document, N float32; NaN without words. It depends on the document alone."""
        out = [np.zeros(0, np.float32)]
        for part in chunks(*flatten(texts)):
            words, lower = split_words(part.data, part.starts)
            hashed, numbers = hashes(lower, words), np.maximum(words.counts, 1)
            base = self._spelled(hashed, words, lower)
            logs = self.words.log_probabilities(hashed, words, base)
            document = np.repeat(np.arange(len(numbers)), words.counts)
            if self.measure == "order":
                logs -= Counts(self.words.tables[:1]).log_probabilities(hashed, words, base)
                bits = np.bincount(document, logs, len(numbers)) / np.log(2) / numbers
            else:
                sizes = np.bincount(document, words.ends - words.heads + 1, len(numbers))
                bits = -np.bincount(document, logs, len(numbers)) / np.log(2) / np.maximum(sizes, 1)
            out.append(np.where(words.counts > 0, bits, np.nan).astype(np.float32))
        return np.concatenate(out)

    def _spelled(self, word_hashes: np.ndarray, words: Pieces, lower: np.ndarray) -> np.ndarray:
        """ln of the probability of the spelling of each word, P; each different word is spelled once."""
        distinct, first, inverse = np.unique(word_hashes, return_index=True, return_inverse=True)
        signs, spelled = _signs(lower, words.heads[first], words.ends[first])
        base = np.full(len(signs), -np.log(257))
        base[spelled.starts[:-1]] = 0.0  # the sign before a word is certain
        logs = self.spelling.log_probabilities(_SIGN_HASHES[signs], spelled, base)
        logs[spelled.starts[:-1]] = 0.0
        word = np.repeat(np.arange(len(distinct)), spelled.counts)
        return np.bincount(word, logs, len(distinct))[inverse]

    def tensors(self) -> dict[str, np.ndarray]:
        """The content of its file."""
        return self.words.tensors("words") | self.spelling.tensors("spelling")

    @classmethod
    def read(cls, tensors: dict[str, Any], measure: str) -> "NgramModel":
        words, spelling = Counts.read(tensors, "words", WORDS), Counts.read(tensors, "spelling", BYTES)
        return cls(words, spelling, cast(Measure, measure))


def train(texts: pl.Series, measure: Measure = "perplexity") -> NgramModel:
    """Count the n-grams of texts. Triples of words that occur once are forgotten: they are most of the memory.

    Words are spelled as the different words of the texts are, each counted once, because unknown words are rare ones.
    """
    data, starts = flatten(texts)
    heads, known = [np.zeros(0, np.uint64)], [np.zeros(1, np.int64)]
    spellings: dict[int, bytes] = {}
    for part in chunks(data, starts):
        pieces, lower = split_words(part.data, part.starts)
        word_hashes = hashes(lower, pieces)
        heads.append(word_hashes)
        known.append(pieces.starts[1:] + known[-1][-1])
        distinct, first = np.unique(word_hashes, return_index=True)
        raw = lower.tobytes()
        spans = zip(distinct.tolist(), pieces.heads[first].tolist(), pieces.ends[first].tolist(), strict=True)
        spellings |= {word: raw[head:end] for word, head, end in spans if word not in spellings}
    all_hashes, all_starts = np.concatenate(heads), np.concatenate(known)
    every = np.arange(len(all_hashes))
    words = Counts.of(all_hashes, Pieces(every, every + 1, all_starts), WORDS, least=2)
    ends = np.cumsum([len(word) for word in spellings.values()], dtype=np.int64)
    lower = np.frombuffer(b"".join(spellings.values()), np.uint8)
    signs, spelled = _signs(lower, np.append(0, ends[:-1])[: len(ends)], ends)
    return NgramModel(words, _spelling(signs, spelled), measure)


def _spelling(signs: np.ndarray, spelled: Pieces) -> Counts:
    """Counts of signs within words. The sign before a word is a context only: it is never predicted."""
    counts = Counts.of(_SIGN_HASHES[signs], spelled, BYTES)
    single = counts.tables[0]
    begin = mix(_SIGN_HASHES[_BEGIN : _BEGIN + 1].copy())
    keep = single.grams != begin
    totals = _u32(np.array([single.counts[keep].sum()]))
    grams, seen = single.grams[keep], single.counts[keep]
    counts.tables[0] = Table(grams, seen, single.contexts, totals, _u32(np.array([len(grams)])))
    return counts


def _signs(lower: np.ndarray, heads: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, Pieces]:
    """The signs of words: one before, the bytes, and one after; each word is a text of its own."""
    starts = np.append(0, np.cumsum(ends - heads + 2))
    word = np.repeat(np.arange(len(heads)), ends - heads + 2)
    place = np.arange(starts[-1]) - starts[:-1][word]
    inside = (place > 0) & (place <= (ends - heads)[word])
    signs = np.where(place == 0, _BEGIN, _END)
    signs[inside] = lower[(heads[word] + place - 1)[inside]].astype(np.int64) + 1
    return signs, Pieces(np.arange(starts[-1]), np.arange(starts[-1]) + 1, starts)
