"""Cleans, measures and judges a batch of documents: the part of a corpus stage that any worker can do alone.

`prepare` maps an Arrow batch to an Arrow batch: scores and drop reasons are columns, and no row is removed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from ingot.core.events import Display
from ingot.corpus import contents, dedup, filters, near_duplicates
from ingot.corpus.contamination import CONTAINS, CONTAMINATED, Items, contained, read_items
from ingot.corpus.languages import LANGUAGE_COLUMNS, OTHER_LANGUAGE, check_languages, identify
from ingot.corpus.published_rules import JUDGED, RuleSets, is_judged
from ingot.corpus.settings import CorpusSettings

KEY = "_key"
"""Column with the fingerprint of a document."""


class Loaded(NamedTuple):
    """What the settings of a stage name, loaded once."""

    filters: Mapping[str, filters.Filter]
    items: Items | None
    """Of the evaluations to keep out."""


def load(settings: CorpusSettings, display: Display) -> Loaded:
    """Load filters, the model of languages, and evaluations.

    Raises:
        UserError: one of them cannot be loaded.
    """
    check_languages(settings.languages)
    items = read_items(settings.decontaminate) if settings.decontaminate else None
    if items and items.too_short:
        display.notify(f"decontaminate: {items.too_short:,} items have fewer than five words and are not searched for")
    return Loaded(filters.load_filters(settings.filters), items)


def prepare(batch: pa.Table, settings: CorpusSettings, loaded: Loaded) -> pa.Table:
    """Clean and filter raw documents. A pure function.

    Args:
        batch: documents of schema `readers.read.RAW`.
        settings: the stage's settings.
        loaded: what the settings name (`load`).

    Returns:
        The same rows with the columns of `SCHEMA` except `split`, and raw_bytes, pii_*, drop_reason (null: keep), _key,
        and _signature if near-duplicates are dropped.
    """
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    raw_bytes = frame["text"].str.len_bytes().cast(pl.Int64)
    cleaned = contents.clean_documents(frame["text"], frame["extra"], settings)
    sizes = cleaned.texts.str.len_bytes().cast(pl.Int64)
    nothing = pl.Series(values=[None] * len(frame), dtype=pl.String)
    extra, metadata = (nothing, cleaned.extras) if settings.format == "text" else (cleaned.extras, nothing)
    columns = {"text": cleaned.texts, "extra": extra, "metadata": metadata, "raw_bytes": raw_bytes, "bytes": sizes}
    by_words = settings.languages or loaded.items is not None or settings.dedup.minhash
    plain = contents.plain_texts(cleaned.texts, settings.format) if by_words else cleaned.texts
    frame = frame.with_columns(**columns, **cleaned.pii, **_languages(plain, settings))
    if any(isinstance(one, RuleSets) for one in loaded.filters.values()):
        frame = frame.with_columns(is_judged(frame).alias(JUDGED))
    frame = frame.with_columns(drop_reason=_reasons(frame, cleaned, settings, loaded.filters))
    if loaded.items is not None:
        frame = frame.with_columns(**_contamination(plain, frame["drop_reason"], loaded.items))
    table = frame.to_arrow()
    if settings.dedup.minhash:
        table = table.append_column(
            near_duplicates.SIGNATURE, near_duplicates.signature_column(plain, settings.dedup.minhash)
        )
    table = table.append_column("cluster", pa.array(dedup.clusters(cleaned.clusters), pa.uint64()))
    return table.append_column(KEY, pa.array(cleaned.keys, pa.binary(16)))


def _contamination(texts: pl.Series, reasons: pl.Series, items: Items) -> dict[str, pl.Series]:
    """The reason for documents that contain an item and have no other reason, and the item's number."""
    found = pl.Series(contained(texts, items))
    drop = (found >= 0) & reasons.is_null()
    return {
        "drop_reason": reasons.scatter(drop.arg_true(), CONTAMINATED),
        CONTAINS: pl.select(pl.when(drop).then(found)).to_series(),
    }


def _languages(texts: pl.Series, settings: CorpusSettings) -> dict[str, pl.Series]:
    if settings.languages:
        return identify(texts).to_dict()
    return {name: pl.Series([None] * len(texts), dtype=dtype) for name, dtype in LANGUAGE_COLUMNS.items()}


def _reasons(
    frame: pl.DataFrame, cleaned: contents.Cleaned, settings: CorpusSettings, user_filters: Mapping[str, filters.Filter]
) -> pl.Series:
    """The first reason to drop each document, or null: content, language, quality bounds, then `user_filters`."""
    reasons = cleaned.reasons
    if settings.languages:
        others = ~frame["language"].is_in(settings.languages) & reasons.is_null()
        reasons = reasons.scatter(others.arg_true(), OTHER_LANGUAGE)
    rows = reasons.is_null().arg_true()
    if not len(rows):
        return reasons
    if settings.bounds is not None and cleaned.squeezed is not None:
        frame = frame.with_columns(cleaned.squeezed.alias(filters.SQUEEZED))
    rest = frame[rows] if len(rows) < len(frame) else frame
    if settings.bounds is not None:
        rest = filters.measure(rest)
        reasons = reasons.scatter(rows, filters.check_bounds(rest, settings.bounds))
    if user_filters:
        reasons = reasons.scatter(rows, reasons.gather(rows).fill_null(filters.apply_filters(rest, user_filters)))
    return reasons
