"""Accounts for every document and byte: in = kept + dropped (per reason) + quarantined.

Bytes are sizes of the raw text (of the unreadable line or file for quarantined ones), so the sum is exact;
`clean_bytes` is the size of the kept documents after cleaning. The result is four files: `funnel.json` (counts),
`rules.json` (what each rule did, `rule_counts.py`), `dropped.parquet` (every dropped document with its reason and first
400 characters) and `quarantine.jsonl` (rows and files that could not be read). `funnel.json` also says what became of
the fields of the rows.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_json, atomic_open
from ingot.corpus.contamination import CONTAINS, CONTAMINATED, FOUND, Items
from ingot.corpus.contents import PROBLEMS
from ingot.corpus.dedup import EXACT_DUPLICATE
from ingot.corpus.filters import QUALITY_RULES
from ingot.corpus.languages import OTHER_LANGUAGE
from ingot.corpus.left_out import LEFT_OUT
from ingot.corpus.near_duplicates import NEAR_DUPLICATE, SAMPLE_CHARACTERS
from ingot.corpus.pii import KINDS
from ingot.corpus.published_rules import JUDGED
from ingot.corpus.repair import BOILERPLATE, REPAIRED
from ingot.corpus.repeated import OVERLAP, REMOVED_LINES, REPEATED_LINES
from ingot.corpus.rule_counts import RuleCounts
from ingot.corpus.rules import Rule

MAX_FIELDS = 1000
"""Maximum number of field names that are counted by name; data can have others in every row."""
DROPPED = pa.schema(
    {
        "source": pa.string(),
        "path": pa.string(),
        "offset": pa.int64(),
        "reason": pa.string(),
        "bytes": pa.int64(),  # of the raw text
        "text": pa.string(),  # first 400 characters after cleaning
    }
)
CONTAMINATION = pa.schema(
    {
        "source": pa.string(),
        "path": pa.string(),
        "offset": pa.int64(),
        "item": pa.string(),  # FILE: line or paragraph
        "text": pa.string(),  # first 400 characters of the item
    }
)
_ORDER = {r: i for i, r in enumerate((*PROBLEMS, *QUALITY_RULES))} | {
    OTHER_LANGUAGE: len(PROBLEMS) - 0.5,
    CONTAMINATED: 9_999,
    LEFT_OUT: 9_999.5,
    EXACT_DUPLICATE: 10_000,
    NEAR_DUPLICATE: 10_001,
    OVERLAP: 10_002,
    REPEATED_LINES: 10_003,
}
STEPS = (
    *("reading", "content", "language", "quality", "filters", "evaluations"),
    *("exact duplicates", "near-duplicates", "overlap", "repeated lines"),
)
"""The steps of a corpus, in order."""
_STEP_OF = {
    **dict.fromkeys(PROBLEMS, "content"),
    OTHER_LANGUAGE: "language",
    **dict.fromkeys(QUALITY_RULES, "quality"),
    CONTAMINATED: "evaluations",
    EXACT_DUPLICATE: "exact duplicates",
    NEAR_DUPLICATE: "near-duplicates",
    OVERLAP: "overlap",
    REPEATED_LINES: "repeated lines",
}
"""Reason -> step; others are of filters."""
RULES = "rules.json"
"""File of a corpus stage: what each rule removed, near misses, and histograms of its measure."""


@dataclass(frozen=True)
class Quarantined:
    """A row or file that could not be read as a document."""

    source: str
    path: str
    line: int  # 1-based; 0 for formats without lines and for complete files
    offset: int  # byte of the line or of the damage; in a table the row number
    bytes: int
    reason: str
    row: int = 0  # 1-based; 0 if `line` is given
    documents: int = 1  # number of lost documents; more than one for a damaged part of a table

    def message(self) -> str:
        """Location and reason, for error messages."""
        return f"{location(asdict(self))}: {self.reason}"


def location(record: Mapping[str, Any]) -> str:
    """File and line (or row) of an entry of `quarantine.jsonl`."""
    where = next((f": {unit} {record[unit]:,}" for unit in ("line", "row") if record.get(unit)), "")
    return f"{record['path']}{where}"


class Counts:
    """Counts of one source or of all sources. Each pair of integers is [documents, bytes]."""

    def __init__(self) -> None:
        self.kept = [0, 0]
        self.quarantined = [0, 0]
        self.dropped: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.pii = dict.fromkeys(KINDS, 0)
        self.lines: Counter[str] = Counter()
        """Lines that were repaired or removed."""
        self.clean_bytes = 0
        self.languages: Counter[str] = Counter()

    def summary(self) -> dict[str, Any]:
        """The counts as JSON data, reasons in the order of their checks."""
        reasons = sorted(self.dropped, key=lambda r: (_ORDER.get(r, 5_000), r))
        outcomes = [self.kept, self.quarantined, *self.dropped.values()]
        return {
            "in": _pair([sum(o[0] for o in outcomes), sum(o[1] for o in outcomes)]),
            "kept": {**_pair(self.kept), "clean_bytes": self.clean_bytes},
            "dropped": {reason: _pair(self.dropped[reason]) for reason in reasons},
            "quarantined": _pair(self.quarantined),
            "pii": self.pii,
            **({"lines": dict(self.lines)} if self.lines else {}),
            **({"languages": dict(self.languages.most_common())} if self.languages else {}),
        }


def _steps(total: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Documents and bytes in and out of each step, from the total counts; a document counts where it is removed."""
    removed = {step: [0, 0] for step in STEPS}
    removed["reading"] = [*total["quarantined"].values()]
    for reason, pair in total["dropped"].items():
        step = removed[_STEP_OF.get(reason, "filters")]
        step[:] = [step[0] + pair["documents"], step[1] + pair["bytes"]]
    left, rows = [*total["in"].values()], []
    for name, (documents, bytes_) in removed.items():
        out = [left[0] - documents, left[1] - bytes_]
        rows.append({"step": name, "in": _pair(left), "out": _pair(out)})
        left = out
    return rows


def _pair(counts: Iterable[int]) -> dict[str, int]:
    return dict(zip(("documents", "bytes"), counts, strict=True))


class Funnel:
    """Context manager that counts documents and writes its four files on success, none of them after an exception."""

    def __init__(self, out: Path, rules: Mapping[str, Rule] | None = None):
        self._out = out
        self.by_rule = RuleCounts(rules or {})
        self._stack = ExitStack()
        self.total = Counts()
        self.sources: dict[str, Counts] = defaultdict(Counts)
        self.first: dict[str, tuple[str, int]] = {}
        """Reason -> (path, offset) of the first document dropped for it."""
        self.not_judged = 0
        """Documents that the published rules are not made for."""
        self.removed_lines = 0
        """Lines that were removed from kept documents, because many share them."""
        self.first_quarantined: Quarantined | None = None
        self.fields: Counter[tuple[str, str]] = Counter()
        """(field, what became of it) -> number of rows."""

    def __enter__(self) -> "Funnel":
        with ExitStack() as stack:
            self._quarantine = stack.enter_context(atomic_open(self._out / "quarantine.jsonl"))
            file = stack.enter_context(atomic_open(self._out / "dropped.parquet"))
            self._dropped = stack.enter_context(pq.ParquetWriter(file, DROPPED, compression="zstd"))
            self._stack = stack.pop_all()
        self._waiting: list[pa.Table] = []
        self._contamination: list[pa.Table] = []
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._flush_dropped(last=True)
        finally:
            self._stack.__exit__(*error)
        if error[0] is None:
            if self._contamination:
                with atomic_open(self._out / FOUND) as file:
                    pq.write_table(pa.concat_tables(self._contamination), file, compression="zstd")
            by_source = {name: counts.summary() for name, counts in self.sources.items()}
            fields = [{"field": name, "use": use, "rows": rows} for (name, use), rows in self.fields.most_common()]
            total = self.total.summary()
            lines = {"removed_lines": self.removed_lines} if self.removed_lines else {}
            counts = {**total, "steps": _steps(total), **lines, "sources": by_source, "fields": fields}
            atomic_json(self._out / "funnel.json", counts)
            removed = {reason: pair["documents"] for reason, pair in total["dropped"].items()}
            atomic_json(self._out / RULES, self.by_rule.summary(removed))

    def quarantine(self, record: Quarantined) -> None:
        """Record and count an unreadable row or file."""
        self.first_quarantined = self.first_quarantined or record
        self._quarantine.write(json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n")
        for counts in (self.total, self.sources[record.source]):
            counts.quarantined[0] += record.documents
            counts.quarantined[1] += record.bytes

    def count_fields(self, uses: Mapping[str, str]) -> None:
        """Count the uses of the fields of one row (`FieldUses.by_name`)."""
        for use in uses.items():
            self.fields[use if use in self.fields or len(self.fields) < MAX_FIELDS else ("others", use[1])] += 1

    def count(self, documents: pa.Table) -> None:
        """Count a batch by its final `drop_reason` (null: kept)."""
        if JUDGED in documents.column_names:
            self.not_judged += documents.num_rows - (pc.sum(documents[JUDGED]).as_py() or 0)
        pii_columns = [f"pii_{kind}" for kind in KINDS]
        line_columns = [name for name in (REPAIRED, BOILERPLATE) if name in documents.column_names]
        sums = ["raw_bytes", "bytes", *pii_columns, *line_columns]
        frame = pl.from_arrow(documents.select(["source", "drop_reason", "path", "offset", *sums]))
        assert isinstance(frame, pl.DataFrame)
        rows = frame.group_by("source", "drop_reason", maintain_order=True).agg(
            pl.col("path", "offset").first(), pl.len(), pl.col(*sums).sum()
        )
        for source, reason, path, offset, number, raw, clean, *changed in rows.iter_rows():
            self.first.setdefault(reason, (path, offset))
            for counts in (self.total, self.sources[source]):
                outcome = counts.kept if reason is None else counts.dropped[reason]
                outcome[0] += number
                outcome[1] += raw
                counts.clean_bytes += clean if reason is None else 0
                counts.pii = {k: counts.pii[k] + n for k, n in zip(KINDS, changed[: len(KINDS)], strict=True)}
                for name, n in zip(line_columns, changed[len(KINDS) :], strict=True):
                    counts.lines[name] += n
        languages = (
            documents.select(["source", "language"]).group_by(["source", "language"]).aggregate([([], "count_all")])
        )
        for row in languages.to_pylist():
            if row["language"] is not None:
                for counts in (self.total, self.sources[row["source"]]):
                    counts.languages[row["language"]] += row["count_all"]
        if REMOVED_LINES in documents.column_names:
            self.removed_lines += pc.sum(documents[REMOVED_LINES]).as_py() or 0
        self.by_rule.count(documents)
        self._record_dropped(documents.filter(pc.is_valid(documents["drop_reason"])))

    def count_contamination(self, documents: pa.Table, items: Items) -> None:
        """Record which document contains which item of an evaluation."""
        rows = documents.filter(pc.is_valid(documents[CONTAINS]))
        numbers = rows[CONTAINS].to_pylist()
        columns = {
            "source": rows["source"],
            "path": rows["path"],
            "offset": rows["offset"],
            "item": pa.array([items.names[n] for n in numbers], pa.string()),
            "text": pa.array([items.texts[n][:SAMPLE_CHARACTERS] for n in numbers], pa.string()),
        }
        self._contamination.append(pa.table(columns).cast(CONTAMINATION))

    def _record_dropped(self, documents: pa.Table) -> None:
        names = {"source": "source", "path": "path", "offset": "offset", "reason": "drop_reason", "bytes": "raw_bytes"}
        columns = [documents[name] for name in names.values()]
        sample = pc.utf8_slice_codeunits(documents["text"], 0, SAMPLE_CHARACTERS)
        self._waiting.append(pa.table([*columns, sample], names=[*names, "text"]).cast(DROPPED))
        self._flush_dropped()

    def _flush_dropped(self, last: bool = False, rows: int = 4096) -> None:
        """Write row groups of a fixed size, so the file does not depend on the batches that arrive."""
        table = pa.concat_tables([DROPPED.empty_table(), *self._waiting]).combine_chunks()
        while table.num_rows >= rows or (last and table.num_rows):
            self._dropped.write_table(table.slice(0, rows).combine_chunks())
            table = table.slice(rows)
        self._waiting = [table]
