"""Cleans the content of documents of every format and computes their duplicate and cluster keys.

The messages of a row are cleaned one by one because a pattern must not see JSON escapes. Two rows are duplicates if all
of their content is equal: both answers of a pair, the extra fields of a prompt. Two rows share a cluster if they ask
the same: all pairs of one prompt are in one cluster, so no validation prompt occurs in training.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.corpus import clean, dedup, pii, repair
from ingot.corpus.documents import messages_of, text_fields_of
from ingot.corpus.readers.fields import Format
from ingot.corpus.readers.messages import is_trained_on, only_last_answer, without_reasoning
from ingot.corpus.readers.row_formats import dump_document
from ingot.corpus.settings import CorpusSettings

PROBLEMS = {
    "empty": "found an empty question or answer, expected text",
    "no_answer": "found no assistant message to train on, expected at least one",
    "equal_sides": "found equal chosen and rejected answers, expected different ones",
}
"""Reasons to drop a row because of its content, with their messages."""


class Cleaned(NamedTuple):
    """Documents after cleaning, one per input row."""

    texts: pl.Series
    extras: pl.Series
    reasons: pl.Series
    """A key of `PROBLEMS` for each document to drop, else null."""
    counts: dict[str, pl.Series]
    """`pii_KIND` -> number of masked items per document; `repair.REPAIRED` and `BOILERPLATE`, where they are set."""
    keys: list[bytes]
    """Fingerprints; equal for duplicates."""
    clusters: list[bytes]
    """Fingerprints; equal for documents that must be in the same split."""
    squeezed: pl.Series | None = None
    """`dedup.squeeze` of the texts (format `text` only), from which quality is measured."""


def clean_documents(texts: pl.Series, extras: pl.Series, prose: pl.Series, settings: CorpusSettings) -> Cleaned:
    """Clean documents of any format and mask personal data. A pure function.

    Args:
        texts, extras: columns of `readers.read.RAW`.
        prose: whether a document is not source code, in which no line is repaired or removed.
        settings: the stage's settings.
    """
    return (_clean_texts if settings.format == "text" else _clean_rows)(texts, extras, prose, settings)


def plain_texts(texts: pl.Series, format: Format) -> pl.Series:
    """What documents of any format say, without roles and JSON."""
    if format == "text":
        return texts
    documents = (messages_of(json.loads(text)) for text in texts)
    return pl.Series(["\n".join(m[n] for m, n in _text_fields(document)) for document in documents], dtype=pl.String)


def _clean_texts(texts: pl.Series, extras: pl.Series, prose: pl.Series, settings: CorpusSettings) -> Cleaned:
    texts, counts = _clean(texts, prose, settings)
    extras, counts = _mask_extras(extras, settings, counts)
    blank = (~texts.str.contains(r"\S")).arg_true()
    reasons = _reasons([None] * len(texts)).scatter(blank, "empty")
    squeezed = dedup.squeeze(texts)
    keys = dedup.fingerprints(squeezed)
    return Cleaned(texts, extras, reasons, counts, keys, keys, pl.Series(squeezed))


def _clean_rows(texts: pl.Series, extras: pl.Series, prose: pl.Series, settings: CorpusSettings) -> Cleaned:
    documents = [_learned(json.loads(text), settings) for text in texts]
    messages = [messages_of(document) for document in documents]
    flat = pl.Series([m[name] for row in messages for m, name in _text_fields(row)], dtype=pl.String)
    lengths = [sum(1 for _ in _text_fields(row)) for row in messages]
    flat_prose = pl.Series(np.repeat(prose.to_numpy(), lengths), dtype=pl.Boolean)
    cleaned, message_counts = _clean(flat, flat_prose, settings)
    duplicate_keys, cluster_keys = _identities(documents, messages, dedup.squeeze(cleaned), settings)
    _set_texts(messages, cleaned)
    counts = _sum_per_row(message_counts, lengths)
    extras, counts = _mask_extras(extras, settings, counts)
    texts = pl.Series([dump_document(document) for document in documents], dtype=pl.String)
    reasons = _reasons([_reason(d, row, settings) for d, row in zip(documents, messages, strict=True)])
    if settings.format == "prompts":
        duplicate_keys = duplicate_keys + "\n" + extras.fill_null("")
    keys = _fingerprints(duplicate_keys)
    clusters = keys if cluster_keys is duplicate_keys else _fingerprints(cluster_keys)
    return Cleaned(texts, extras, reasons, counts, keys, clusters)


def _clean(texts: pl.Series, prose: pl.Series, settings: CorpusSettings) -> tuple[pl.Series, dict[str, pl.Series]]:
    """The texts clean and masked, and the columns of `Cleaned.counts`."""
    texts, counts = unmasked(texts, prose, settings)
    texts, masked = _mask(texts, settings)
    return texts, counts | masked


def unmasked(texts: pl.Series, prose: pl.Series, settings: CorpusSettings) -> tuple[pl.Series, dict[str, pl.Series]]:
    """The texts clean, with personal data, and the columns of `repair`. Wrong characters are repaired before cleaning,
    which removes some of them as control characters."""
    counts: dict[str, pl.Series] = {}
    if settings.repair_unicode:
        texts, counts[repair.REPAIRED] = _where(prose, texts, repair.repair_unicode)
    texts = clean.clean_texts(texts, settings.trim_lines)
    if settings.boilerplate == "drop":
        texts, counts[repair.BOILERPLATE] = _where(prose, texts, repair.remove_boilerplate)
        texts = clean.clean_texts(texts)  # what precedes the last line may be blank
    return texts, counts


def _where(
    rows: pl.Series, texts: pl.Series, change: Callable[[pl.Series], tuple[pl.Series, pl.Series]]
) -> tuple[pl.Series, pl.Series]:
    """A function of texts, which returns them changed with counts, applied to the rows that are true."""
    chosen = rows.arg_true()
    counts = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    if not len(chosen):
        return texts, counts
    changed, numbers = change(texts.gather(chosen))
    return texts.clone().scatter(chosen, changed), counts.scatter(chosen, numbers)


def _learned(document: Any, settings: CorpusSettings) -> Any:
    """The document after the settings `reasoning` and `train_on`."""
    if settings.reasoning == "drop" and isinstance(document, dict):
        document = {side: [*map(without_reasoning, messages)] for side, messages in document.items()}
    elif settings.reasoning == "drop":
        document = [*map(without_reasoning, document)]
    return only_last_answer(document) if settings.train_on == "last answer" else document


def _text_fields(messages: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """(message, name of a field with text) of each text in a row."""
    return ((message, name) for message in messages for name in text_fields_of(message))


def _set_texts(messages: list[list[dict[str, Any]]], texts: Iterable[Any]) -> None:
    fields = (field for row in messages for field in _text_fields(row))
    for (message, name), text in zip(fields, texts, strict=True):
        message[name] = text


def _identities(
    documents: list[Any], messages: list[list[dict[str, Any]]], squeezed: pa.LargeStringArray, settings: CorpusSettings
) -> tuple[pl.Series, pl.Series]:
    """Strings that are equal for duplicates, and strings that are equal within a cluster.

    Overwrites the contents of `messages` with their squeezed texts: `squeeze` does not see the white space that JSON
    writes as an escape, so it must run before serialisation.
    """
    _set_texts(messages, squeezed.to_pylist())
    if settings.format == "chat":
        turns = [_turns(document) for document in documents]
        learned = [[(is_trained_on(m), m.get("reasoning_content")) for m in document] for document in documents]
        duplicate_keys = pl.Series([dump_document(both) for both in zip(turns, learned, strict=True)], dtype=pl.String)
        return duplicate_keys, pl.Series([dump_document(one) for one in turns], dtype=pl.String)
    duplicate_keys = pl.Series([dump_document(document) for document in documents], dtype=pl.String)
    if settings.format != "pairs":
        return duplicate_keys, duplicate_keys
    return duplicate_keys, pl.Series([dump_document(document["prompt"]) for document in documents], dtype=pl.String)


def _fingerprints(texts: pl.Series) -> list[bytes]:
    return dedup.fingerprints(dedup.squeeze(texts))


def _reason(document: Any, messages: list[dict[str, Any]], settings: CorpusSettings) -> str | None:
    if any(not m["content"].strip() for m in messages):
        return "empty"
    if settings.format == "chat" and not any(map(is_trained_on, messages)):
        return "no_answer"
    if settings.format == "pairs" and _texts(document["chosen"]) == _texts(document["rejected"]):
        return "equal_sides"
    return None


def _turns(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(role, squeezed content) of each message."""
    return [(m["role"], " ".join(m["content"].split())) for m in messages]


def _texts(messages: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """(role, squeezed texts) of each message."""
    return [(m["role"], *(" ".join(m[name].split()) for name in text_fields_of(m))) for m in messages]


def _reasons(values: list[str | None]) -> pl.Series:
    return pl.Series("drop_reason", values, dtype=pl.String)


def _mask(texts: pl.Series, settings: CorpusSettings) -> tuple[pl.Series, dict[str, pl.Series]]:
    if not settings.pii:
        zero = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
        return texts, {f"pii_{kind}": zero for kind in pii.KINDS}
    texts, counts = pii.mask_pii(texts)
    return texts, {f"pii_{kind}": count for kind, count in counts.items()}


def _sum_per_row(counts: dict[str, pl.Series], lengths: list[int]) -> dict[str, pl.Series]:
    """Sum counts per string to counts per row, where row i consists of the next `lengths[i]` strings (0 or more)."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - np.asarray(lengths, dtype=np.int64)

    def per_row(count: pl.Series) -> pl.Series:
        before = np.concatenate(([0], np.cumsum(count.to_numpy())))
        return pl.Series(before[ends] - before[starts], dtype=pl.Int64)

    return {name: per_row(count) for name, count in counts.items()}


_STRING = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?')
"""A JSON string, and the colon after it if it is a key."""


def _mask_extras(
    extras: pl.Series, settings: CorpusSettings, counts: dict[str, pl.Series]
) -> tuple[pl.Series, dict[str, pl.Series]]:
    """Mask personal data in every string value of the extra fields, and add the numbers of items to `counts`.

    Keys and other values stay unchanged. A regular expression on the JSON replaces recursion, whose depth Python limits
    and JSON does not.
    """
    if not settings.pii or extras.null_count() == len(extras):
        return extras, counts
    values = [[json.loads(s) for s, key in _STRING.findall(extra or "") if not key] for extra in extras]
    flat = pl.Series([value for row in values for value in row], dtype=pl.String)
    masked, flat_counts = _mask(flat, settings)
    replacements = iter(masked)

    def replace(match: re.Match[str]) -> str:
        return match[0] if match[2] else json.dumps(next(replacements), ensure_ascii=False)

    replaced = [None if extra is None else _STRING.sub(replace, extra) for extra in extras]
    more = _sum_per_row(flat_counts, [len(row) for row in values])
    return pl.Series(replaced, dtype=pl.String), counts | {name: counts[name] + count for name, count in more.items()}
