"""Near-duplicates: documents that share most of their runs of five words (MinHash, Broder 1997).

A document is the set of its runs of five words, lowercased, without punctuation. Its signature has one number a hash
function: the smallest hash of any run. Two documents agree in a number with a probability equal to their Jaccard
similarity |A and B| / |A or B|, so the fraction of equal numbers estimates it.

All pairs are too many to compare. Signatures are cut into bands, and only documents that agree in all numbers of a band
are candidates (locality-sensitive hashing): with 25 bands of 5, a pair of similarity 0.7 is one with probability
1 - (1 - 0.7^5)^25 = 0.99. Candidates are then verified by their complete signatures, without which chains of weak
matches join thousands of documents.

In memory are keys of 8 bytes; signatures may be a memory map. The result depends on the documents and their order
alone.

In scripts without blanks every character counts as a word. A document of fewer than five words has no near-duplicates;
exact deduplication covers it.

Shapes: N documents, K hash functions, S runs of words.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ingot.corpus.pieces import BASE, Pieces, chunks, hashes, mix, runs, split
from ingot.corpus.readers.utf8 import find_sequences, flatten
from ingot.corpus.settings import MinHashSettings

WORDS = 5
_KEYS_BYTES = 512 << 20
"""Memory for keys; those of fewer bands are held at once if there are more documents."""
_UNSPACED_LEADS = range(0xE3, 0xEA)
"""Lead bytes of Chinese and Japanese characters."""


def _classes() -> np.ndarray:
    """For each byte: itself in lower case if it is part of a word, else 0."""
    table = np.zeros(256, np.uint8)
    for byte in range(256):
        if byte >= 0x80 or chr(byte).isalnum():
            table[byte] = ord(chr(byte).lower()) if byte < 0x80 else byte
    return table


_CLASSES = _classes()


def _multipliers(number: int) -> tuple[np.ndarray, np.ndarray]:
    """a (odd) and b of the hash functions x -> a x + b mod 2^32."""
    draws = mix(np.arange(1, 2 * number + 1, dtype=np.uint64) * np.uint64(BASE))
    return (draws[:number] >> np.uint64(32)).astype(np.uint32) | np.uint32(1), (draws[number:]).astype(np.uint32)


def signatures(texts: pl.Series, number: int) -> np.ndarray:
    """MinHash signatures of texts, N x K uint32; a row of zeros for a text of fewer than five words."""
    data, starts = flatten(texts)
    out = np.zeros((len(texts), number), np.uint32)
    for part in chunks(data, starts):
        _minima(*_runs(part.data, part.starts), out[part.first : part.last])
    return out


def _runs(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of five words, S uint32, and how many each text has, N."""
    words, _, keys = word_runs(data, starts)
    return (keys >> np.uint64(32)).astype(np.uint32), np.maximum(words.counts - (WORDS - 1), 0)


def word_runs(data: np.ndarray, starts: np.ndarray) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """`run_hashes` of runs of five."""
    return run_hashes(data, starts, WORDS)


def run_hashes(data: np.ndarray, starts: np.ndarray, length: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """The words of texts; of each run of `length` the number of its first word, and its hash (uint64)."""
    words, bytes_ = split_words(data, starts)
    return words, *runs(hashes(bytes_, words), words, length)


def split_words(data: np.ndarray, starts: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Words, and the bytes in lower case, without punctuation."""
    bytes_ = _CLASSES[data]
    signs = find_sequences(data, 0xE2, [*range(0x8080, 0x80C0), *range(0x8180, 0x81B0)])
    bytes_[signs] = bytes_[signs + 1] = bytes_[signs + 2] = 0  # dashes, quotation marks, ellipses
    unspaced = (data >= _UNSPACED_LEADS[0]) & (data <= _UNSPACED_LEADS[-1])
    return split(bytes_ != 0, starts, unspaced), bytes_


def _minima(runs: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """Write the smallest hash of each text's runs for every hash function."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return
    ends = np.cumsum(counts[rows])
    starts, hashed = np.append(0, ends[:-1]), np.empty_like(runs)
    minima = np.empty((out.shape[1], len(rows)), np.uint32)
    for row, a, b in zip(minima, *_multipliers(out.shape[1]), strict=True):
        np.multiply(runs, a, out=hashed)
        hashed += b
        np.minimum.reduceat(hashed, starts, out=row)
    out[rows] = minima.T


class Match(NamedTuple):
    """What becomes of the documents: for each the number of the one that is kept for it (itself: kept)."""

    kept_for: np.ndarray
    similarity: np.ndarray
    """Estimated similarity to that document."""


def find(signatures_NK: np.ndarray, preference: np.ndarray, settings: MinHashSettings) -> Match:
    """Find near-duplicates.

    Args:
        signatures_NK: uint32, may be a memory map; a row of zeros has no near-duplicates.
        preference: a number for each document, N; the one with the highest of a cluster is kept, of equal ones the
            first.
        settings: bands, rows, threshold.
    """
    a, b = _candidates(signatures_NK, settings)
    good = _similarity(signatures_NK, a, b) >= settings.threshold
    labels = _components(len(signatures_NK), a[good], b[good])
    numbers = np.arange(len(labels))
    order = np.lexsort((numbers, -preference, labels))
    heads = np.flatnonzero(np.append(True, labels[order][1:] != labels[order][:-1])) if len(order) else order
    kept_for = np.empty(len(labels), np.int64)
    kept_for[order] = np.repeat(order[heads], np.diff(np.append(heads, len(order))))
    similarity = np.ones(len(labels), np.float32)
    others = np.flatnonzero(kept_for != numbers)
    similarity[others] = _similarity(signatures_NK, others, kept_for[others])
    return Match(kept_for, similarity)


def _candidates(signatures_NK: np.ndarray, settings: MinHashSettings) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of documents that agree in a band: each with the first one that has its key."""
    pairs = [np.zeros((0, 2), np.int64)]
    for keys in _keys(signatures_NK, settings):
        order = np.argsort(keys, kind="stable")
        order = order[np.searchsorted(keys[order], np.uint64(1)) :]  # key 0: no signature
        ordered = keys[order]
        is_first = np.append(True, ordered[1:] != ordered[:-1]) if len(ordered) else np.zeros(0, bool)
        firsts = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))] if len(order) else order
        pairs.append(np.stack([firsts, order], 1)[~is_first])
    a, b = np.unique(np.concatenate(pairs), axis=0).T
    return a, b


def _keys(signatures_NK: np.ndarray, settings: MinHashSettings) -> Iterator[np.ndarray]:
    """The keys of each band, N uint64; 0 without a signature. Reads the signatures once for as many as fit memory."""
    number = len(signatures_NK)
    together = max(1, min(settings.bands, _KEYS_BYTES // max(1, 8 * number)))
    for first in range(0, settings.bands, together):
        bands = range(first, min(first + together, settings.bands))
        keys = np.empty((len(bands), number), np.uint64)
        for start in range(0, number, 1 << 14):
            block = np.asarray(signatures_NK[start : start + (1 << 14)])
            empty = ~block.any(1)
            for row, band in enumerate(bands):
                key = np.full(len(block), band + 1, np.uint64)
                for column in range(band * settings.rows, (band + 1) * settings.rows):
                    key = mix(key * np.uint64(BASE) + block[:, column])
                keys[row, start : start + len(block)] = np.where(empty, 0, np.maximum(key, 1))
        yield from keys


def _similarity(signatures_NK: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Estimated similarity of pairs: the fraction of equal numbers."""
    out = np.empty(len(a), np.float32)
    for start in range(0, len(a), 1 << 14):
        part = slice(start, start + (1 << 14))
        out[part] = (signatures_NK[a[part]] == signatures_NK[b[part]]).mean(1)
    return out


def _components(number: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Connected components: for each node the smallest number in its component."""
    labels = np.arange(number)
    while True:
        least = np.minimum(labels[a], labels[b])
        before = labels.copy()
        np.minimum.at(labels, a, least)
        np.minimum.at(labels, b, least)
        labels = labels[labels]
        if np.array_equal(labels, before):
            return labels
