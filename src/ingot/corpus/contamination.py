"""Finds documents that contain items of evaluations, which would make their results worthless.

An item is what one row of a JSONL file says, all of its texts together, or a paragraph of another text file. A document
contains an item if it has at least 25 % of the item's runs of five words; of an item of fewer than 13 words all of
them, since short ones are often ordinary phrases. So a copy with a tenth of its words changed is found, too: it keeps
0.9^5 = 59 % of its runs. Words are compared in lower case and without punctuation. Items of fewer than five words
cannot be searched for.

Shapes: G runs of words of all items, N documents.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from ingot.core.errors import UserError, name_file
from ingot.corpus.minhash import WORDS, plain_words
from ingot.corpus.pieces import chunks, hashes, inside, runs
from ingot.corpus.readers.utf8 import flatten

CONTAMINATED = "contaminated"
"""The `drop_reason` of a document that contains an item."""
CONTAINS = "_contains"
FOUND = "contamination.parquet"
"""File of a corpus stage: each dropped document with the item that it contains."""
_SHARE, _SHORT_ITEM = 0.25, 13


class Items(NamedTuple):
    """Items of evaluations."""

    hashes_G: np.ndarray
    """Runs of words, sorted."""
    items_G: np.ndarray
    """The item of each run; a run of several items stands there several times."""
    needed: np.ndarray
    """Different runs that a document must have, for each item."""
    names: Sequence[str]
    """`FILE: row N` of each item."""
    texts: Sequence[str]
    too_short: int
    """Items of fewer than five words, which are not searched for."""


def read_items(paths: Sequence[str]) -> Items:
    """Read the items of evaluation files.

    Raises:
        UserError: a file is missing, is not JSON where its name says so, or has no item of five words.
    """
    names, texts = [], []
    for path in paths:
        found = list(_items(Path(path)))
        names += [f"{path}: {unit}" for unit, _ in found]
        texts += [text for _, text in found]
    data, starts = flatten(pl.Series(texts, dtype=pl.String))
    words, bytes_ = plain_words(data, starts)
    keys = runs(hashes(bytes_, words), WORDS)
    at = np.flatnonzero(inside(words.starts, WORDS)[: len(keys)])
    items = np.searchsorted(words.starts, at, side="right") - 1
    pairs = np.unique(np.stack([keys[at], items.astype(np.uint64)], 1), axis=0)
    if not len(pairs):
        raise UserError(f"decontaminate: found no item of {WORDS} words in {', '.join(paths)}; name evaluation texts")
    of_item = pairs[:, 1].astype(np.int64)
    number = np.bincount(of_item, minlength=len(texts))
    needed = np.where(words.counts < _SHORT_ITEM, number, np.ceil(_SHARE * number)).astype(np.int64)
    return Items(pairs[:, 0], of_item, needed, names, texts, int((number == 0).sum()))


def _items(path: Path) -> Iterator[tuple[str, str]]:
    """(row or paragraph, text) of each item."""
    if not path.is_file():
        raise UserError(f"decontaminate: found no file {path}, expected a JSONL file or a text with evaluation items")
    with name_file(path):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".jsonl", ".ndjson", ".jsonlines"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"decontaminate: {path}: line {number}: {error}; fix the line") from None
                if not (isinstance(row, dict) and "task" in row and "prompt" not in row):  # the first line of a task
                    yield f"line {number}", " ".join(_strings(row))
    else:
        for number, paragraph in enumerate(text.split("\n\n"), 1):
            if paragraph.strip():
                yield f"paragraph {number}", paragraph


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def contained(texts: pl.Series, items: Items) -> np.ndarray:
    """For each document the number of the item of which it has the most runs beyond what is needed, or -1; N."""
    data, starts = flatten(texts)
    out = np.full(len(texts), -1, np.int64)
    for first, last in chunks(starts):
        _search(data[starts[first] : starts[last]], starts[first : last + 1] - starts[first], items, out[first:last])
    return out


def _search(data: np.ndarray, starts: np.ndarray, items: Items, out: np.ndarray) -> None:
    words, bytes_ = plain_words(data, starts)
    keys = runs(hashes(bytes_, words), WORDS)
    at = np.flatnonzero(inside(words.starts, WORDS)[: len(keys)])
    low = np.searchsorted(items.hashes_G, keys[at])
    hit = np.flatnonzero(items.hashes_G[np.minimum(low, len(items.hashes_G) - 1)] == keys[at])
    if not len(hit):
        return
    at, low = at[hit], low[hit]
    number = np.searchsorted(items.hashes_G, keys[at], side="right") - low
    where = np.repeat(low - np.append(0, np.cumsum(number)[:-1]), number) + np.arange(number.sum())
    documents = np.repeat(np.searchsorted(words.starts, at, side="right") - 1, number)
    seen = np.unique(np.stack([documents, where], 1), axis=0)  # a run that a document repeats counts once
    pairs, counts = np.unique(np.stack([seen[:, 0], items.items_G[seen[:, 1]]], 1), axis=0, return_counts=True)
    share = counts / items.needed[pairs[:, 1]]
    for document, item in pairs[np.argsort(share, kind="stable")][np.sort(share) >= 1]:
        out[document] = item
