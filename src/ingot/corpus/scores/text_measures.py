"""Measures of documents that need no model: scores by rules, for text that a model has written.

| measure | is |
|---|---|
| `words` | number of words |
| `repetition` | fraction of its runs of three words that it had before (Welleck et al. 2019, arXiv:1908.04319) |
| `similarity` | largest fraction of its different runs of three words that one earlier document has |

Of a conversation the answers that are trained on are measured. Words are in lower case, without punctuation; in scripts
without blanks every character is one. A document of one or two words has one run: itself.

Shapes: N documents.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import get_args

import numpy as np
import polars as pl

from ingot.corpus.contents import plain_texts
from ingot.corpus.minhash import run_hashes, split_words
from ingot.corpus.pieces import Pieces
from ingot.corpus.readers.fields import Format
from ingot.corpus.readers.messages import is_trained_on
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.scores.settings import TextMeasure

RUN = 3
"""Words of a run."""


def measured_texts(texts: pl.Series, format: Format) -> pl.Series:
    """What is measured of documents."""
    if format != "chat":
        return plain_texts(texts, format)
    conversations = (json.loads(text) for text in texts)
    answers = ("\n".join(m["content"] for m in messages if is_trained_on(m)) for messages in conversations)
    return pl.Series([*answers], dtype=pl.String)


class TextMeasures:
    """Measures documents in order.

    Args:
        names: the measures; without `similarity` no run is kept in memory.
    """

    def __init__(self, names: Collection[TextMeasure] = get_args(TextMeasure)):
        self._names = names
        self._documents: dict[int, list[int]] = {}
        """Hash of a run -> the earlier documents that have it."""
        self._number = 0

    def compare_with(self, texts: pl.Series) -> None:
        """Count documents as earlier ones."""
        for runs in _runs(texts):
            self._add(runs)

    def __call__(self, texts: pl.Series) -> dict[TextMeasure, np.ndarray]:
        """The measures of the next documents, N float64 each; NaN for runs of a document without words."""
        words = split_words(*flatten(texts))[0].counts
        repetition, similarity = np.full(len(texts), np.nan), np.full(len(texts), np.nan)
        for i, runs in enumerate(_runs(texts)):
            if len(runs):
                repetition[i] = 1 - len(set(runs)) / len(runs)
            if len(runs) and "similarity" in self._names:
                similarity[i] = self._similarity(runs)
                self._add(runs)
        measures = {"words": words.astype(np.float64), "repetition": repetition, "similarity": similarity}
        return {name: measures[name] for name in self._names}

    def _similarity(self, runs: list[int]) -> float:
        different, shared = set(runs), Counter[int]()
        for run in different:
            shared.update(self._documents.get(run, ()))
        return max(shared.values(), default=0) / len(different)

    def _add(self, runs: list[int]) -> None:
        for run in set(runs):
            self._documents.setdefault(run, []).append(self._number)
        self._number += 1


def _runs(texts: pl.Series) -> Iterator[list[int]]:
    """Hashes of the runs of words of each text."""
    data, starts = flatten(texts)
    by_length = [run_hashes(data, starts, length) for length in (RUN, 2, 1)]
    for text in range(len(texts)):
        yield next(filter(None, (_of_text(text, *found) for found in by_length)), [])


def _of_text(text: int, words: Pieces, at: np.ndarray, keys: np.ndarray) -> list[int]:
    first, last = np.searchsorted(at, words.starts[text : text + 2])
    return keys[first:last].tolist()
