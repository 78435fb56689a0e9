"""Finds documents that contain items of evaluations, which would make their results worthless.

An item is what one row of a file of rows says, all of its texts together, or a paragraph of a text. A document
contains an item if it has at least 25 % of the item's runs of five words; of an item of fewer than 13 words all of
them, since short ones are often ordinary phrases. So a copy with a tenth of its words changed is found, too: it keeps
0.9^5 = 59 % of its runs. Words are compared in lower case and without punctuation. Items of fewer than five words
cannot be searched for.

Shapes: G runs of words of all items, N documents.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from ingot.core.errors import UserError
from ingot.corpus.minhash import word_runs
from ingot.corpus.pieces import chunks
from ingot.corpus.readers.content import content_kind, identify
from ingot.corpus.readers.files import BadRow, Row
from ingot.corpus.readers.locate import InputFile, evaluation_file
from ingot.corpus.readers.packing import Damaged
from ingot.corpus.readers.rows import file_rows
from ingot.corpus.readers.tables import LostRows
from ingot.corpus.readers.utf8 import flatten

CONTAMINATED = "contaminated"
"""The `drop_reason` of a document that contains an item."""
CONTAINS = "_contains"
FOUND = "contamination.parquet"
"""File of a corpus stage: each dropped document with the item that it contains."""
_SHARE, _SHORT_ITEM = 0.25, 13
_MAX_BYTES = 64_000_000


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
        UserError: a file is missing, or a row of it cannot be read; or there is no item.
    """
    names, texts = [], []
    for path in paths:
        found = list(_items(Path(path)))
        names += [f"{path}: {unit}" for unit, _ in found]
        texts += [text for _, text in found]
    if not texts:
        raise UserError(f"decontaminate: found no item in {', '.join(paths)}; name evaluation texts")
    words, at, keys = word_runs(*flatten(pl.Series(texts, dtype=pl.String)))
    pairs = np.unique(np.stack([keys, words.texts_of(at).astype(np.uint64)], 1), axis=0)
    of_item = pairs[:, 1].astype(np.int64)
    number = np.bincount(of_item, minlength=len(texts))
    needed = np.where(words.counts < _SHORT_ITEM, number, np.ceil(_SHARE * number)).astype(np.int64)
    return Items(pairs[:, 0], of_item, needed, names, texts, int((number == 0).sum()))


def _items(path: Path) -> Iterator[tuple[str, str]]:
    """(line, row or paragraph; text) of each item."""
    file = InputFile(evaluation_file(str(path)), str(path), path.name)
    try:
        text, head = identify(file.file, None, _MAX_BYTES)
        kind = content_kind(head, file.kind, file.is_source)
        rows = file_rows(text, kind)
        if rows is not None:
            yield from _row_items(rows)
        elif kind == "text":
            paragraphs = b"".join(text.blocks()).decode().replace("\r\n", "\n").split("\n\n")
            yield from ((f"paragraph {n}", paragraph) for n, paragraph in enumerate(paragraphs, 1) if paragraph.strip())
        else:
            raise Damaged(f"is {kind} without rows; name a file of rows or plain text")
    except (Damaged, UnicodeDecodeError) as error:
        raise UserError(f"decontaminate: {path}: {error}") from None


def _row_items(rows: Iterator[Row | LostRows]) -> Iterator[tuple[str, str]]:
    """Every row counts: an item that cannot be read could not be kept out."""
    for row in rows:
        if isinstance(row, LostRows):
            raise Damaged(f"row {row.row + 1}: {row.reason}")
        place = f"line {row.line}" if row.line else f"row {row.row}"
        if isinstance(row.value, BadRow):
            raise Damaged(f"{place}: {row.value}")
        is_head = isinstance(row.value, dict) and "task" in row.value and "prompt" not in row.value  # of a task file
        if not is_head:
            yield place, " ".join(_strings(row.value))


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
    if not len(items.hashes_G):
        return out
    for part in chunks(data, starts):
        _search(part.data, part.starts, items, out[part.first : part.last])
    return out


def _search(data: np.ndarray, starts: np.ndarray, items: Items, out: np.ndarray) -> None:
    words, at, keys = word_runs(data, starts)
    low = np.searchsorted(items.hashes_G, keys)
    hit = np.flatnonzero(items.hashes_G[np.minimum(low, len(items.hashes_G) - 1)] == keys)
    if not len(hit):
        return
    at, low, keys = at[hit], low[hit], keys[hit]
    number = np.searchsorted(items.hashes_G, keys, side="right") - low
    where = np.repeat(low - np.append(0, np.cumsum(number)[:-1]), number) + np.arange(number.sum())
    documents = np.repeat(words.texts_of(at), number)
    seen = np.unique(np.stack([documents, where], 1), axis=0)  # a run that a document repeats counts once
    pairs, counts = np.unique(np.stack([seen[:, 0], items.items_G[seen[:, 1]]], 1), axis=0, return_counts=True)
    share = counts / items.needed[pairs[:, 1]]
    for document, item in pairs[np.argsort(share, kind="stable")][np.sort(share) >= 1]:
        out[document] = item
