"""What a document holds, cleaned: the text itself, or the messages of a row; and what makes two rows the same.

Messages are cleaned one by one, for a pattern must not see JSON's escapes. A pair shares its cluster with every pair of
the same prompt, so a split by cluster never asks in validation what training answered; rows are repeated only where
all of them is: both sides of a pair, the further fields of a prompt too.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.corpus import clean, dedup, pii
from ingot.corpus.documents import messages_of
from ingot.corpus.readers.row_formats import dump_document, is_learned
from ingot.corpus.settings import CorpusSettings

PROBLEMS = {
    "empty": "found a question or an answer without a character, expected some",
    "no_answer": "found no message of an assistant to learn, expected one",
    "equal_sides": "found the same answer chosen and rejected, expected two that differ",
}
"""What is wrong with a row that goes already now."""


class Cleaned(NamedTuple):
    """Documents after cleaning, row for row."""

    texts: pl.Series
    extras: pl.Series
    reasons: pl.Series
    """Why a document goes already now, a key of `PROBLEMS`; null where it does not."""
    pii: dict[str, pl.Series]
    """`pii_KIND`: how many were masked."""
    keys: list[bytes]
    """Fingerprints that are equal for documents that repeat each other."""
    clusters: list[bytes]
    """Fingerprints that are equal for documents that belong on one side of a split."""
    squeezed: pl.Series | None = None
    """Running text with one blank between words, which measures are taken of."""


def clean_documents(texts: pl.Series, extras: pl.Series, settings: CorpusSettings) -> Cleaned:
    """Clean and mask documents of any format; pure.

    Args:
        texts, extras: columns of `readers.RAW`.
        settings: of the stage.
    """
    return (_texts if settings.format == "text" else _rows)(texts, extras, settings)


def _texts(texts: pl.Series, extras: pl.Series, settings: CorpusSettings) -> Cleaned:
    texts, found = _masked(clean.clean_texts(texts, settings.trim_lines), settings)
    blank = (~texts.str.contains(r"\S")).arg_true()
    reasons = _reasons([None] * len(texts)).scatter(blank, "empty")
    squeezed = dedup.squeeze(texts)
    keys = dedup.fingerprints(squeezed)
    return Cleaned(texts, extras, reasons, found, keys, keys, pl.Series(squeezed))


def _rows(texts: pl.Series, extras: pl.Series, settings: CorpusSettings) -> Cleaned:
    documents = [json.loads(text) for text in texts]
    messages = [messages_of(document) for document in documents]
    flat = pl.Series([m["content"] for row in messages for m in row], dtype=pl.String)
    cleaned, found = _masked(clean.clean_texts(flat, settings.trim_lines), settings)
    same, asked = _same(documents, messages, dedup.squeeze(cleaned), settings)
    _put(messages, cleaned)
    found = _summed(found, [len(row) for row in messages])
    if settings.pii:
        extras, more = _masked_extras(extras, settings)
        found = {name: count + more[name] for name, count in found.items()}
    texts = pl.Series([dump_document(document) for document in documents], dtype=pl.String)
    reasons = _reasons([_reason(d, row, settings) for d, row in zip(documents, messages, strict=True)])
    if settings.format == "prompts":
        same = same + "\n" + extras.fill_null("")
    keys = _fingerprints(same)
    return Cleaned(texts, extras, reasons, found, keys, keys if asked is same else _fingerprints(asked))


def _put(messages: list[list[dict[str, Any]]], contents: Iterable[Any]) -> None:
    for message, content in zip((m for row in messages for m in row), contents, strict=True):
        message["content"] = content


def _same(
    documents: list[Any], messages: list[list[dict[str, Any]]], squeezed: pa.LargeStringArray, settings: CorpusSettings
) -> tuple[pl.Series, pl.Series]:
    """What is equal for documents that repeat each other, and for those of one side of a split.

    White space within messages counts as one blank; in their JSON a line's end is two characters.
    """
    _put(messages, squeezed.to_pylist())
    if settings.format == "chat":
        said = [_said(document) for document in documents]
        learned = [[is_learned(m) for m in document] for document in documents]
        same = pl.Series([dump_document(both) for both in zip(said, learned, strict=True)], dtype=pl.String)
        return same, pl.Series([dump_document(one) for one in said], dtype=pl.String)
    same = pl.Series([dump_document(document) for document in documents], dtype=pl.String)
    if settings.format != "pairs":
        return same, same
    return same, pl.Series([dump_document(document["prompt"]) for document in documents], dtype=pl.String)


def _fingerprints(texts: pl.Series) -> list[bytes]:
    return dedup.fingerprints(dedup.squeeze(texts))


def _reason(document: Any, messages: list[dict[str, Any]], settings: CorpusSettings) -> str | None:
    if any(not m["content"].strip() for m in messages):
        return "empty"
    if settings.format == "chat" and not any(map(is_learned, messages)):
        return "no_answer"
    if settings.format == "pairs" and _said(document["chosen"]) == _said(document["rejected"]):
        return "equal_sides"
    return None


def _said(side: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(m["role"], " ".join(m["content"].split())) for m in side]


def _reasons(values: list[str | None]) -> pl.Series:
    return pl.Series("drop_reason", values, dtype=pl.String)


def _masked(texts: pl.Series, settings: CorpusSettings) -> tuple[pl.Series, dict[str, pl.Series]]:
    if not settings.pii:
        zero = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
        return texts, {f"pii_{kind}": zero for kind in pii.KINDS}
    texts, found = pii.mask_pii(texts)
    return texts, {f"pii_{kind}": count for kind, count in found.items()}


def _summed(found: dict[str, pl.Series], lengths: list[int]) -> dict[str, pl.Series]:
    """Counts of strings as counts of rows that hold so many of them each (possibly none)."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - np.asarray(lengths, dtype=np.int64)

    def per_row(count: pl.Series) -> pl.Series:
        before = np.concatenate(([0], np.cumsum(count.to_numpy())))
        return pl.Series(before[ends] - before[starts], dtype=pl.Int64)

    return {name: per_row(count) for name, count in found.items()}


_STRING = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?')
"""A string in JSON, and the colon that makes it a key."""


def _masked_extras(extras: pl.Series, settings: CorpusSettings) -> tuple[pl.Series, dict[str, pl.Series]]:
    """Personal data masked in every string of the further fields, which are left as they are otherwise.

    Strings are found in the JSON itself: rows may be nested more deeply than functions can be.
    """
    leaves = [[json.loads(s) for s, key in _STRING.findall(extra or "") if not key] for extra in extras]
    flat = pl.Series([leaf for row in leaves for leaf in row], dtype=pl.String)
    masked, found = _masked(flat, settings)
    replies = iter(masked)

    def reply(match: re.Match[str]) -> str:
        return match[0] if match[2] else json.dumps(next(replies), ensure_ascii=False)

    replaced = [None if extra is None else _STRING.sub(reply, extra) for extra in extras]
    return pl.Series(replaced, dtype=pl.String), _summed(found, [len(row) for row in leaves])
