"""The second phase of a corpus: what becomes of each document beside all others, by columns without text."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.core.events import Display
from ingot.corpus import dedup, near_duplicates, repeated
from ingot.corpus.left_out import COLUMNS, LEFT_OUT, left_out
from ingot.corpus.rules import KEY
from ingot.corpus.settings import CorpusSettings
from ingot.corpus.spool import SPOOL, Spool


class Verdicts:
    """The reasons of the second phase, two bytes a document.

    Args:
        dropped: documents that have a reason already, N bool.
    """

    def __init__(self, dropped: np.ndarray):
        self.dropped = dropped
        """Documents that have a reason, of this phase or before."""
        self.lines: tuple[np.ndarray, int] | None = None
        """Hashes of the lines to remove, and `min_characters`."""
        self._reasons: list[str | None] = [None]
        self._codes = np.zeros(len(dropped), np.int16)

    def drop(self, rows: np.ndarray, reason: str) -> None:
        """Give a reason to documents, by their numbers, that have none."""
        rows = rows[~self.dropped[rows]]
        self._codes[rows] = len(self._reasons)
        self._reasons.append(reason)
        self.dropped[rows] = True

    def apply(self, table: pa.Table, first: int) -> pa.Table:
        """A batch of documents with the final column `drop_reason`, and without repeated lines.

        Args:
            table: with the columns `columns` names.
            first: the number of its first document.
        """
        codes = pa.array(self._codes[first : first + table.num_rows])
        reasons = pa.array(self._reasons, pa.large_string()).take(codes)
        final = pc.coalesce(table["drop_reason"].cast(pa.large_string()), reasons)
        table = table.set_column(table.schema.get_field_index("drop_reason"), "drop_reason", final)
        return table if self.lines is None else repeated.remove_lines(table, *self.lines)

    def columns(self, names: list[str]) -> list[str]:
        """The columns that `apply` needs to give these."""
        return names if self.lines is None else [*names, repeated.LINES]


def decide(settings: CorpusSettings, spool: Spool, out: Path, display: Display) -> Verdicts:
    """Drop duplicates, and find the lines that many documents share. Near-duplicates are recorded in `out`."""
    reasons, keys = [np.zeros(0, bool)], [np.zeros((0, 16), np.uint8)]
    for table in spool.tables(["drop_reason", KEY]):
        reasons.append(pc.is_valid(table["drop_reason"]).to_numpy(zero_copy_only=False))
        keys.append(dedup.rows_of(table[KEY]))
    verdicts = Verdicts(np.concatenate(reasons))
    if settings.without:
        verdicts.drop(left_out(spool.tables(COLUMNS), settings.without), LEFT_OUT)
    if settings.dedup.exact:
        kept = np.flatnonzero(~verdicts.dropped)
        verdicts.drop(kept[dedup.repeats(np.concatenate(keys)[kept])], dedup.EXACT_DUPLICATE)
    if settings.dedup.minhash:
        with display.bar("near-duplicates", len(verdicts.dropped), "documents") as bar:
            match = near_duplicates.find_near_duplicates(
                spool.tables(near_duplicates.columns(settings.dedup.minhash)),
                verdicts.dropped,
                settings.dedup.minhash,
                out / SPOOL / "signatures",
                display.notify,
            )
            bar.advance(len(verdicts.dropped))
        places = spool.tables(["source", "path", "offset", "text"])
        near_duplicates.write_pairs(places, match, out)
        verdicts.drop(np.flatnonzero(match.kept_for != np.arange(len(match.kept_for))), near_duplicates.NEAR_DUPLICATE)
    if settings.dedup.overlap:
        runs = (table[repeated.RUNS].combine_chunks() for table in spool.tables([repeated.RUNS]))
        copies = repeated.overlapping(runs, verdicts.dropped, settings.dedup.overlap.fraction)
        verdicts.drop(np.flatnonzero(copies), repeated.OVERLAP)
    if settings.dedup.lines:
        found = repeated.frequent(_lines(spool, verdicts.dropped), settings.dedup.lines.documents)
        verdicts.lines = found, settings.dedup.lines.min_characters
    return verdicts


def _lines(spool: Spool, dropped: np.ndarray) -> Iterator[np.ndarray]:
    """Hashes of the lines of all documents that are kept."""
    first = 0
    for table in spool.tables([repeated.LINES]):
        kept = ~dropped[first : first + table.num_rows]
        first += table.num_rows
        yield table[repeated.LINES].combine_chunks().filter(pa.array(kept)).flatten().to_numpy()
