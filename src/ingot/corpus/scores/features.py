"""Documents as sparse vectors of hashed n-grams, the input of the linear classifier (`classifier.py`).

The n-grams are single words, pairs of words, and runs of four bytes. Words tell what a document is about, pairs whether
their order is that of a language, and bytes whether unknown words are spelled like words. Each n-gram falls into one of
2^20 buckets by its hash. The value of a bucket is 1 + ln(occurrences), and every document has length 1, so that a long
document counts as much as a short one.

Shapes: N documents, F entries (pairs of a document and a bucket that it has).
"""

from typing import NamedTuple

import numpy as np
import polars as pl

from ingot.corpus.minhash import split_words
from ingot.corpus.pieces import BASE, Part, Pieces, chunks, hashes, mix, runs
from ingot.corpus.readers.utf8 import flatten

BITS = 20
BUCKETS = 1 << BITS
_BYTES = 4
_BYTE_HASHES = mix(np.arange(1, 257, dtype=np.uint64) * np.uint64(BASE))


class Features(NamedTuple):
    """The vectors of N documents, by document."""

    documents_F: np.ndarray
    """int64"""
    buckets_F: np.ndarray
    """uint32"""
    values_F: np.ndarray
    """float32"""
    number: int
    """N; documents without any n-gram have no entry."""

    def times(self, weights: np.ndarray) -> np.ndarray:
        """The product with a weight for each bucket, N float64. A document's sum depends on its own entries alone."""
        return np.bincount(self.documents_F, weights[self.buckets_F] * self.values_F, minlength=self.number)

    def transposed_times(self, values_N: np.ndarray) -> np.ndarray:
        """The product of the transpose with a value for each document, one float64 a bucket."""
        return np.bincount(self.buckets_F, values_N[self.documents_F] * self.values_F, minlength=BUCKETS)


def features(texts: pl.Series) -> Features:
    """The vectors of texts. A pure function of each text."""
    parts = [_part(part) for part in chunks(*flatten(texts))]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 3
    documents, buckets, values = columns
    return Features(documents, buckets.astype(np.uint32), values.astype(np.float32), len(texts))


def _part(part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents, buckets and values of some texts."""
    size = len(part.data)
    bytes_ = Pieces(np.arange(size), np.arange(1, size + 1), part.starts)
    words, lower = split_words(part.data, part.starts)
    word_hashes, keys = hashes(lower, words), []
    for number, (pieces, hashed, length) in enumerate(
        ((words, word_hashes, 1), (words, word_hashes, 2), (bytes_, _BYTE_HASHES[part.data], _BYTES)), 1
    ):
        at, found = runs(hashed, pieces, length)
        buckets = mix(found + np.uint64(number)) >> np.uint64(64 - BITS)
        keys.append(pieces.texts_of(at).astype(np.uint64) << np.uint64(BITS) | buckets)
    entries, occurrences = np.unique(np.concatenate(keys), return_counts=True)
    documents = (entries >> np.uint64(BITS)).astype(np.int64)
    values = 1 + np.log(occurrences)
    lengths = np.sqrt(np.bincount(documents, values**2, minlength=len(part.starts) - 1))
    return documents + part.first, entries & np.uint64(BUCKETS - 1), values / lengths[documents]
