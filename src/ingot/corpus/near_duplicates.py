"""Drops near-duplicates: documents that share most of their text with one that is kept (`minhash.py`).

Signatures of all documents are compared before the first is kept or dropped; text is not held in memory.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_open
from ingot.core.errors import UserError, nearest
from ingot.corpus.dedup import rows_of
from ingot.corpus.minhash import Match, find, signatures
from ingot.corpus.rules import MEASURES
from ingot.corpus.settings import MinHashSettings

NEAR_DUPLICATE = "near_duplicate"
"""The `drop_reason` of a document that resembles one that is kept."""
SIGNATURE = "_signature"
PAIRS = "near_duplicates.parquet"
"""File of a corpus stage: each dropped near-duplicate with the document that is kept for it, and their similarity."""
SAMPLE_CHARACTERS = 400
LANGUAGE_SCORE, METADATA = "language_score", "metadata."
"""What `keep = "best"` can go by beside the measures of rules: a column, and `metadata.NAME`, a number of a row."""
_PLACE = pa.schema({"source": pa.string(), "path": pa.string(), "offset": pa.int64(), "text": pa.string()})


def signature_column(texts: pl.Series, settings: MinHashSettings) -> pa.Array:
    """The signatures of texts as a column."""
    flat = signatures(texts, settings.bands * settings.rows)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 * flat.shape[1]), len(flat), [None, pa.py_buffer(flat)])


def check_measure(settings: MinHashSettings, measures: Collection[str], languages: Collection[str]) -> None:
    """Raise UserError if `by` is no measure of the corpus.

    Args:
        settings: of the near-duplicates.
        measures: those of the rules of the corpus.
        languages: the setting `languages`.
    """
    known = [*measures, *([LANGUAGE_SCORE] if languages else [])]
    if settings.by is not None and settings.by not in known and not settings.by.startswith(METADATA):
        raise UserError(
            f"dedup.minhash.by: found '{settings.by}', which no rule of this corpus measures; "
            f"{nearest(settings.by, [*known, f'{METADATA}FIELD'])}"
        )


def columns(settings: MinHashSettings) -> list[str]:
    """The columns by which near-duplicates are found and chosen."""
    match settings.keep, settings.by or "":
        case "first", _:
            return [SIGNATURE]
        case "longest", _:
            return [SIGNATURE, "bytes"]
        case _, by if by.startswith(METADATA):
            return [SIGNATURE, "metadata", "extra"]
        case _, by:
            return [SIGNATURE, LANGUAGE_SCORE if by == LANGUAGE_SCORE else MEASURES]


def preference(table: pa.Table, settings: MinHashSettings) -> np.ndarray:
    """How much each document is preferred over others of its cluster, N float64; -inf where the measure is missing."""
    if settings.by is None:
        return table["bytes"].to_numpy().astype(np.float64) if settings.keep == "longest" else np.zeros(len(table))
    if settings.by.startswith(METADATA):
        values = _metadata(table, settings.by.removeprefix(METADATA))
    elif settings.by == LANGUAGE_SCORE:
        values = table[LANGUAGE_SCORE].to_numpy().astype(np.float64)
    else:
        values = table[MEASURES].combine_chunks().field(settings.by).to_numpy(zero_copy_only=False)
    return np.where(np.isnan(values), -np.inf, values if settings.prefer == "high" else -values)


def _metadata(table: pa.Table, name: str) -> np.ndarray:
    """A number that rows have beside the document, N float64; NaN without a finite one."""
    rows = pc.coalesce(table["metadata"], table["extra"]).to_pylist()
    return np.array([_finite(json.loads(row).get(name)) if row else np.nan for row in rows], float)


def _finite(value: Any) -> float:
    """A finite number; NaN for anything else: JSON has Infinity, and a document with it would always be the best."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan


def find_near_duplicates(
    tables: Iterable[pa.Table],
    dropped: np.ndarray,
    settings: MinHashSettings,
    scratch: Path,
    notify: Callable[[str], None] = lambda message: None,
) -> Match:
    """Compare all documents by their signatures, which wait in a file so that memory does not grow with them.

    Args:
        tables: the columns `columns(settings)` of all documents, in order.
        dropped: documents that are not compared, N bool.
        settings: of the signatures.
        scratch: a file that is written and removed.
        notify: is given a message if documents have no number to prefer them by.
    """
    width = settings.bands * settings.rows
    preferences, first = [np.zeros(0)], 0
    try:
        with scratch.open("wb") as file:
            for table in tables:
                flat = rows_of(table[SIGNATURE]).view(np.uint32)
                file.write(np.where(dropped[first : first + len(flat), None], np.uint32(0), flat).tobytes())
                preferences.append(preference(table, settings))
                first += len(flat)
        stored = np.memmap(scratch, np.uint32, "r", shape=(first, width)) if first else np.zeros((0, width), np.uint32)
        preferred = np.concatenate(preferences)
        without = int((preferred == -np.inf).sum())
        if without and without == len(preferred):
            raise UserError(
                f"dedup.minhash.by: found no document with the number {settings.by}, expected some; name another one"
            )
        if without:
            notify(
                f"dedup.minhash.by: {without:,} of {len(preferred):,} documents have no finite number {settings.by}; "
                "any other copy is preferred"
            )
        return find(stored, preferred, settings)
    finally:
        scratch.unlink(missing_ok=True)


def write_pairs(tables: Iterable[pa.Table], match: Match, out: Path) -> None:
    """Write `PAIRS`: where each dropped near-duplicate and the document kept for it come from, and how both begin.

    Args:
        tables: `source`, `path`, `offset` and `text` of all documents, in order.
        match: what becomes of them.
        out: the stage's directory.
    """
    dropped = np.flatnonzero(match.kept_for != np.arange(len(match.kept_for)))
    wanted = np.unique(np.concatenate([dropped, match.kept_for[dropped]]))
    places, first = [_PLACE.empty_table()], 0
    for table in tables:
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + table.num_rows)] - first
        chosen = table.take(inside)
        beginning = pc.utf8_slice_codeunits(chosen["text"], 0, SAMPLE_CHARACTERS)
        places.append(chosen.set_column(3, "text", beginning).cast(_PLACE))
        first += table.num_rows
    table = pa.concat_tables(places)
    both = [table.take(np.searchsorted(wanted, numbers)) for numbers in (dropped, match.kept_for[dropped])]
    names = [*_PLACE.names, *(f"kept_{name}" for name in _PLACE.names)]
    pairs = pa.table([*both[0].columns, *both[1].columns], names=names)
    pairs = pairs.append_column("similarity", pa.array(match.similarity[dropped]))
    with atomic_open(out / PAIRS) as file:
        pq.write_table(pairs, file, compression="zstd")
