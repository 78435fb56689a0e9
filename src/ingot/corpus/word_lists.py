"""Drops documents with many words of a list, such as insults, advertising or adult content.

A list has a word or a phrase on each line; empty lines and those that begin with
# are skipped. Words are compared in lower case, without punctuation, and complete: "crap" does not occur in "scrap".

Chinese and Japanese characters are words of their own, so an entry in these scripts is found anywhere in the text. In
other scripts without blanks (Thai, Lao, Khmer, Burmese) an entry is found only between blanks or punctuation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from ingot.core.errors import MissingFile, UserError, nearest
from ingot.corpus.contents import plain_texts
from ingot.corpus.minhash import split_words
from ingot.corpus.pieces import chunks, hashes, runs
from ingot.corpus.readers.fields import Format
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.rules import Rule
from ingot.corpus.settings import WordList

_FOLDER = Path(__file__).parent / "lists"
LISTS = {path.stem: path for path in sorted(_FOLDER.glob("*.txt"))}
"""Lists of ours. They are for English, short, and no judgement of a text that quotes or discusses such words."""
THOUSAND = 1000


def list_file(name: str, words: WordList) -> Path:
    """The file of a list.

    Raises:
        UserError: it is missing, or no list of ours has that name.
    """
    if words.path is None:
        if name not in LISTS:
            raise UserError(
                f"words: no list '{name}' of ours; {nearest(name, LISTS)}; name a file of yours with `path`"
            )
        return LISTS[name]
    if not Path(words.path).is_file():
        raise MissingFile(f"words.{name}: found no file {words.path}, expected a list with a word or phrase a line")
    return Path(words.path)


def entries(name: str, words: WordList) -> list[str]:
    """The words and phrases of a list. Raises UserError if it has none, or is not UTF-8."""
    file = list_file(name, words)
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(f"words.{name}: {file} is not UTF-8 ({error.reason}); save it as UTF-8") from None
    if not (found := [line for line in lines if line and not line.startswith("#")]):
        raise UserError(f"words.{name}: {file} has no entry, expected a word or phrase a line; add some")
    return found


class WordLists(NamedTuple):
    """A filter (`filters.py`) by lists of words, for which a text is cut into words once.

    The measure of a list is hits per 1,000 words: 0 below `min_hits`, which never drop a document, and NaN for a
    document in a language that the list is not for.
    """

    hashes: Mapping[str, Mapping[int, np.ndarray]]
    """List -> number of words of an entry -> hashes of these entries, sorted."""
    settings: Mapping[str, WordList]
    format: Format

    @property
    def rules(self) -> dict[str, Rule]:
        """Reason -> rule of each list."""
        return {
            f"{name}_words": Rule(f"words.{name}", most=words.max_per_thousand) for name, words in self.settings.items()
        }

    def measures(self, documents: pl.DataFrame) -> dict[str, np.ndarray]:
        """Measure of each list -> value of each document, N float64."""
        hits, words = self.hits(plain_texts(documents["text"], self.format))
        out = {}
        for name, settings in self.settings.items():
            per_thousand = THOUSAND * hits[name] / np.maximum(words, 1)
            out[f"words.{name}"] = np.where(hits[name] >= settings.min_hits, per_thousand, 0.0)
            if settings.languages:
                is_for = documents["language"].is_in(settings.languages).fill_null(True)
                out[f"words.{name}"][~is_for.to_numpy()] = np.nan
        return out

    def hits(self, texts: pl.Series) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Hits of each list in each text, and the words of each text; N."""
        hits = {name: [np.zeros(0, np.int64)] for name in self.hashes}
        counts = [np.zeros(0, np.int64)]
        lengths = sorted({length for wanted in self.hashes.values() for length in wanted})
        for part in chunks(*flatten(texts.str.to_lowercase())):
            words, lower = split_words(part.data, part.starts)
            hashed = hashes(lower, words)
            phrases = {length: runs(hashed, words, length) for length in lengths}
            counts.append(words.counts)
            for name, wanted in self.hashes.items():
                found = [_places(*phrases[length], entries_) for length, entries_ in wanted.items()]
                hits[name].append(np.bincount(words.texts_of(np.concatenate(found)), minlength=len(words.counts)))
        return {name: np.concatenate(each) for name, each in hits.items()}, np.concatenate(counts)


def _places(at: np.ndarray, keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The words at which phrases begin whose hashes are wanted.

    Args:
        at: the word at which each phrase begins.
        keys: the hash of each phrase.
        wanted: hashes, sorted.
    """
    found = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
    return at[wanted[found] == keys]


def load_word_lists(lists: Mapping[str, WordList], format: Format) -> dict[str, WordLists]:
    """One filter for all lists, by the names of their reasons; none without lists.

    Raises:
        UserError: a list cannot be read, or has an entry without a letter or digit.
    """
    if not lists:
        return {}
    loaded = WordLists({name: _hashes(name, words) for name, words in lists.items()}, lists, format)
    return {", ".join(loaded.rules): loaded}


def _hashes(name: str, words: WordList) -> dict[int, np.ndarray]:
    listed = entries(name, words)
    pieces, lower = split_words(*flatten(pl.Series(listed).str.to_lowercase()))
    if empty := [entry for entry, number in zip(listed, pieces.counts, strict=True) if not number]:
        raise UserError(f"words.{name}: found the entry '{empty[0]}', expected letters or digits; remove it")
    out = {}
    for length in np.unique(pieces.counts).tolist():
        at, keys = runs(hashes(lower, pieces), pieces, length)
        out[length] = np.unique(keys[pieces.counts[pieces.texts_of(at)] == length])
    return out
