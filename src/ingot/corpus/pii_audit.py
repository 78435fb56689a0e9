"""A sample of masked places with their context, to check what `pii` masks. Opt-in: it stores the data that it shows.

A document gives at most one place a kind, its first. Places are chosen by the document's fingerprint, so the sample
does not depend on batches.
"""

import heapq
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from ingot.core.artifact import atomic_json
from ingot.corpus.contents import Cleaned, unmasked
from ingot.corpus.pii import KINDS
from ingot.corpus.rules import KEY
from ingot.corpus.settings import CorpusSettings

AUDIT = "pii_audit.json"
"""File of a corpus stage with `pii_audit`."""
PLACES = "_pii_places"
"""Column with the masked places of a document as JSON (kind -> before, after), or null."""
_CONTEXT, _ANCHOR = 40, 60
_MARKS = re.compile("|".join(re.escape(mark) for mark in KINDS.values()))
_KIND_OF = {mark: kind for kind, mark in KINDS.items()}


def places_column(raw: pl.Series, prose: pl.Series, cleaned: Cleaned, settings: CorpusSettings) -> pa.Array:
    """The column `PLACES`.

    Args:
        raw: texts before cleaning.
        prose: whether a text is not source code.
        cleaned: the texts after cleaning and masking.
        settings: of the stage; of a batch no more documents a kind are looked at than it asks for.
    """
    wanted: set[int] = set()
    for kind in KINDS:
        rows = (cleaned.counts[f"pii_{kind}"] > 0).arg_true().to_list()
        wanted.update(heapq.nsmallest(settings.pii_audit, rows, key=lambda row: cleaned.keys[row]))
    out: list[str | None] = [None] * len(raw)
    rows = sorted(wanted)
    texts, _ = unmasked(raw.gather(rows), prose.gather(rows), settings)
    for row, text in zip(rows, texts, strict=True):
        out[row] = json.dumps(masked_places(text, cleaned.texts[row]), ensure_ascii=False)
    return pa.array(out, pa.string())


def masked_places(text: str, masked: str) -> dict[str, tuple[str, str]]:
    """Kind -> the first masked item with its context, before and after masking.

    Both texts are walked in step: what follows a mark in one follows the item in the other. A mark that the text itself
    contains is no item.
    """
    marks = [*_MARKS.finditer(masked)]
    found: dict[str, tuple[str, str]] = {}
    end = previous = 0
    for i, mark in enumerate(marks):
        start = end + mark.start() - previous
        previous = mark.end()
        following = masked[previous : marks[i + 1].start() if i + 1 < len(marks) else len(masked)]
        anchor = following[:_ANCHOR]
        end = text.find(anchor, start + 1) if anchor else len(text)
        if len(following) < _ANCHOR and i + 1 == len(marks):
            end = len(text) - len(following)
        if end < 0:
            break
        item, kind = text[start:end], _KIND_OF[mark[0]]
        if item != mark[0] and kind not in found:
            before = text[max(0, start - _CONTEXT) : end + _CONTEXT]
            found[kind] = before, masked[max(0, mark.start() - _CONTEXT) : previous + _CONTEXT]
    return found


class Audit:
    """Collects the places of all documents.

    Args:
        number: places of each kind.
    """

    def __init__(self, number: int):
        self._number = number
        self._places: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in KINDS}

    def add(self, documents: pa.Table) -> None:
        """Add documents with the columns `PLACES`, `path`, `offset` and `KEY`."""
        rows = documents.select([PLACES, KEY, "path", "offset"])
        for row in rows.filter(rows[PLACES].is_valid()).to_pylist():
            for kind, (before, after) in json.loads(row[PLACES]).items():
                entry = (row[KEY], row["path"], row["offset"], before, after)
                self._places[kind] = heapq.nsmallest(self._number, [*self._places[kind], entry])

    def write(self, out: Path) -> None:
        """Write `AUDIT`."""
        places = {
            kind: [{"path": p, "offset": o, "before": b, "after": a} for _, p, o, b, a in entries]
            for kind, entries in self._places.items()
            if entries
        }
        warning = (
            "This file contains personal data as read, because the recipe sets pii_audit. Delete it after reading."
        )
        atomic_json(out / AUDIT, {"warning": warning, "places": places})
