"""Cleans, measures and judges a batch of documents: the part of a corpus stage that any worker can do alone.

`prepare` maps an Arrow batch to an Arrow batch: scores and drop reasons are columns, and no row is removed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.core.events import Display
from ingot.corpus import contents, dedup, filters, near_duplicates, pii_audit, repeated
from ingot.corpus.contamination import CONTAINS, CONTAMINATED, Items, contained, read_items
from ingot.corpus.languages import LANGUAGE_COLUMNS, OTHER_LANGUAGE, check_languages, identify
from ingot.corpus.packages import check_packages
from ingot.corpus.published_rules import JUDGED, RuleSets, is_code, is_judged
from ingot.corpus.rules import KEY, MEASURES, REASONS, Rule, first_reasons, measures_column, reasons_column
from ingot.corpus.settings import CorpusSettings
from ingot.corpus.timer import SECONDS, Timer
from ingot.corpus.word_lists import load_word_lists


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
    check_packages(settings)
    items = read_items(settings.decontaminate) if settings.decontaminate else None
    if items and items.too_short:
        display.notify(
            f"decontaminate: {items.too_short:,} of {len(items.texts):,} items have fewer than five words and are not "
            "searched for"
        )
    words = load_word_lists(settings.words, settings.format)
    loaded = Loaded({**words, **filters.load_filters(settings.filters)}, items)
    if settings.dedup.minhash:
        rules = filters.rules_of(loaded.filters, settings.bounds)
        near_duplicates.check_measure(
            settings.dedup.minhash, {rule.measure for rule in rules.values()}, settings.languages
        )
    return loaded


def prepare(batch: pa.Table, settings: CorpusSettings, loaded: Loaded) -> pa.Table:
    """Clean and filter raw documents. A pure function.

    Args:
        batch: documents of schema `readers.read.RAW`.
        settings: the stage's settings.
        loaded: what the settings name (`load`).

    Returns:
        The same rows with the columns of `SCHEMA` except `split`, and raw_bytes, pii_*, drop_reason (null: keep),
        _reasons (all of them), _measures (if there are rules), _key, those of `repair`, `near_duplicates`, `repeated`
        and `pii_audit` if they are set, and _seconds, which differ from call to call.
    """
    timer = Timer()
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    raw = frame["text"]
    raw_bytes = raw.str.len_bytes().cast(pl.Int64)
    with timer("clean"):
        prose = ~_is_code(frame["path"], settings)
        cleaned = contents.clean_documents(raw, frame["extra"], prose, settings)
    sizes = cleaned.texts.str.len_bytes().cast(pl.Int64)
    nothing = pl.Series(values=[None] * len(frame), dtype=pl.String)
    extra, metadata = (nothing, cleaned.extras) if settings.format == "text" else (cleaned.extras, nothing)
    columns = {"text": cleaned.texts, "extra": extra, "metadata": metadata, "raw_bytes": raw_bytes, "bytes": sizes}
    by_words = settings.languages or loaded.items is not None or settings.dedup.minhash or settings.dedup.overlap
    plain = contents.plain_texts(cleaned.texts, settings.format) if by_words else cleaned.texts
    with timer("language"):
        frame = frame.with_columns(**columns, **cleaned.counts, **_languages(plain, settings))
    if any(isinstance(one, RuleSets) for one in loaded.filters.values()):
        frame = frame.with_columns(is_judged(frame).alias(JUDGED))
    broken, measures = _checks(frame, cleaned, settings, loaded.filters, timer)
    added: dict[str, pa.Array] = {}
    if loaded.items is not None:
        with timer("evaluations"):
            found = contained(plain, loaded.items)
        contaminates = (found >= 0) & ~np.any([*broken.values()], axis=0)
        broken[CONTAMINATED] = found >= 0
        added[CONTAINS] = pa.array(found, mask=~contaminates)
    reasons = reasons_column(broken, len(frame))
    added |= {"drop_reason": first_reasons(reasons), REASONS: reasons}
    if measures:
        added[MEASURES] = measures_column(measures)
    added |= _compared(plain, cleaned.texts, settings, timer)
    if settings.pii_audit:
        added[pii_audit.PLACES] = pii_audit.places_column(raw, prose, cleaned, settings)
    added |= {
        "cluster": pa.array(dedup.clusters(cleaned.clusters), pa.uint64()),
        KEY: pa.array(cleaned.keys, pa.binary(16)),
        SECONDS: timer.column(len(frame), steps(settings, loaded)),
    }
    table = frame.to_arrow()
    for name, column in added.items():
        table = table.append_column(name, column)
    return table


def _compared(plain: pl.Series, texts: pl.Series, settings: CorpusSettings, timer: Timer) -> dict[str, pa.Array]:
    """The columns by which documents are compared with each other.

    Args:
        plain: the words of each document.
        texts: the documents in the format's form.
        settings, timer: as in `prepare`.
    """
    columns = {}
    if settings.dedup.minhash:
        with timer("signatures"):
            columns[near_duplicates.SIGNATURE] = near_duplicates.signature_column(plain, settings.dedup.minhash)
    if settings.dedup.overlap:
        with timer("runs"):
            columns[repeated.RUNS] = repeated.runs_column(plain, settings.dedup.overlap.words)
    if settings.dedup.lines:
        with timer("lines"):
            columns[repeated.LINES] = repeated.lines_column(texts, settings.dedup.lines.min_characters)
    return columns


def _is_code(paths: pl.Series, settings: CorpusSettings) -> pl.Series:
    if settings.quality == "code":
        return pl.Series([True] * len(paths), dtype=pl.Boolean)
    return is_code(paths)


def steps(settings: CorpusSettings, loaded: Loaded) -> list[str]:
    """The steps of `prepare` that are timed, in order."""
    out = ["clean", "language"]
    out += [filters.QUALITY] if settings.bounds is not None else []
    out += loaded.filters
    out += ["evaluations"] if loaded.items is not None else []
    dedup = {"signatures": settings.dedup.minhash, "runs": settings.dedup.overlap, "lines": settings.dedup.lines}
    return out + [name for name, wanted in dedup.items() if wanted]


def _languages(texts: pl.Series, settings: CorpusSettings) -> dict[str, pl.Series]:
    if settings.languages:
        return identify(texts).to_dict()
    return {name: pl.Series([None] * len(texts), dtype=dtype) for name, dtype in LANGUAGE_COLUMNS.items()}


def _checks(
    frame: pl.DataFrame,
    cleaned: contents.Cleaned,
    settings: CorpusSettings,
    user_filters: Mapping[str, filters.Filter],
    timer: Timer,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reason -> whether it holds for each document, in the order of the checks: content, language, quality bounds, then
    `user_filters`; and the measures. Documents without usable content, or in another language, are not measured."""
    broken = {reason: (cleaned.reasons == reason).fill_null(False).to_numpy() for reason in contents.PROBLEMS}
    if settings.languages:
        broken[OTHER_LANGUAGE] = ~frame["language"].is_in(settings.languages).to_numpy()
    rows = np.flatnonzero(~np.any([*broken.values()], axis=0))
    if settings.bounds is not None and cleaned.squeezed is not None:
        frame = frame.with_columns(cleaned.squeezed.alias(filters.SQUEEZED))
    rest = frame[rows] if len(rows) < len(frame) else frame
    measures: dict[str, np.ndarray] = {}
    found: dict[str, np.ndarray] = {}
    if settings.bounds is not None:
        with timer(filters.QUALITY):
            rest = filters.measure(rest)
            measures |= filters.quality_measures(rest)
        found |= _broken(filters.quality_rules(settings.bounds), measures)
    for name, function in user_filters.items() if len(rest) else ():
        with timer(name):
            if isinstance(function, filters.RULE_FILTERS):
                measures |= function.measures(rest)
                found |= _broken(function.rules, measures)
            else:
                found |= filters.apply_filter(name, function, rest)
    rules = filters.rules_of(user_filters, settings.bounds)
    names = dict.fromkeys(rule.measure for rule in rules.values())
    return (
        broken | {reason: _spread(mask, rows, len(frame), False) for reason, mask in found.items()},
        {name: _spread(measures.get(name, np.zeros(0)), rows, len(frame), np.nan) for name in names},
    )


def _broken(rules: Mapping[str, Rule], measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {reason: rule.broken(measures[rule.measure]) for reason, rule in rules.items()}


def _spread(values: np.ndarray, rows: np.ndarray, documents: int, fill: float) -> np.ndarray:
    """The values of some documents as those of all."""
    out = np.full(documents, fill)
    out[rows] = values
    return out
