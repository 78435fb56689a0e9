"""Builder of the kind `select`: keeps the documents of a scored corpus whose scores are within bounds.

All scores are read first, without text; then the text streams through once, or twice in the order of a score. Every
document is accounted for: in = kept + dropped (per reason), in `funnel.json`, and `dropped.parquet` has the dropped
ones.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_json, atomic_open
from ingot.core.errors import UserError
from ingot.corpus.documents import (
    PHASE,
    SCORE_PREFIX,
    DocumentWriter,
    columns_of,
    document_parts,
    read_documents,
    split_counts,
)
from ingot.corpus.funnel import DROPPED
from ingot.corpus.languages import UNKNOWN
from ingot.corpus.near_duplicates import SAMPLE_CHARACTERS
from ingot.corpus.scores.selection import OTHER_PHASE, Decision, decide
from ingot.corpus.scores.settings import Bounds
from ingot.corpus.scores.sorting import SortedDocuments, sorted_rows
from ingot.stages.job import Job
from ingot.stages.selection.settings import SelectSettings

HISTOGRAM_BINS = 40
MAX_TIES = 10
"""Rules with many equal scores that the run names; a rule per language may be a hundred."""
_SORTED = ".sorted"


def run(job: Job) -> dict[str, Any]:
    """Decide by the scores of all documents, then write those that are kept."""
    settings, corpus = job.settings, job.inputs["data"].path
    assert isinstance(settings, SelectSettings)
    table = _columns(corpus, settings)
    scores = {name: table[SCORE_PREFIX + name].to_numpy().astype(np.float32) for name in _scores(settings)}
    splits, sizes = _strings(table["split"]), table["bytes"].to_numpy()
    languages = _strings(table["language"].fill_null(UNKNOWN)) if "language" in table.column_names else None
    decision = decide(scores, splits == "train", settings.where, settings.phases, languages)
    reasons = decision.reasons
    if settings.phase:
        reasons[(reasons == None) & (_strings(table[PHASE]) != settings.phase)] = OTHER_PHASE  # noqa: E711 - of each
    kept = reasons == None  # noqa: E711
    dropped, counts = _numbers(reasons), split_counts(splits[kept], sizes[kept])
    if not counts["train_documents"]:
        counted = ", ".join(f"{reason} {number:,}" for reason, number in dropped.items())
        counted += "".join(f"; of {rule}, {t.equal:,} are equal: {t.score:g}" for rule, t in decision.ties.items())
        raise UserError(f"kept no training document of {len(kept):,} ({counted}); relax the bounds")
    for rule, tie in [*decision.ties.items()][:MAX_TIES]:
        job.display.notify(tie.message(rule))
    order = None
    if settings.sort:
        clusters = table["cluster"].to_numpy()
        if job.inputs["data"].format == "pairs":  # several pairs of a prompt are one cluster and no copies
            clusters = np.arange(len(kept))
        order = sorted_rows(scores[settings.sort.by], settings.sort, clusters)
    _write(job, decision, kept, sizes, order)
    atomic_json(job.out / "funnel.json", _funnel(decision, kept, sizes, scores))
    result: dict[str, Any] = {"documents": int(kept.sum()), "bytes": int(sizes[kept].sum()), **counts}
    result |= {"input_documents": len(kept), "dropped_documents": int((~kept).sum())}
    result |= {f"dropped/{reason}": number for reason, number in dropped.items()}
    if decision.phases is not None:
        result |= {f"phase/{p.name}": int((decision.phases == p.name).sum()) for p in settings.phases}
    result |= {f"threshold/{rule}/{side}": value for rule, side, value in _thresholds(decision)}
    job.display.notify(f"{result['documents']:,} of {len(kept):,} documents kept ({result['bytes'] / 1e6:.1f} MB)")
    return result


def _rules(settings: SelectSettings) -> list[tuple[str, Bounds]]:
    """(score, bounds) of all rules."""
    return [rule for where in (settings.where, *(phase.where for phase in settings.phases)) for rule in where.items()]


def _scores(settings: SelectSettings) -> list[str]:
    """The scores that documents are selected or sorted by."""
    return sorted({*(name for name, _ in _rules(settings)), *([settings.sort.by] if settings.sort else [])})


def _columns(corpus: Path, settings: SelectSettings) -> pa.Table:
    """The columns of all documents that decide on them."""
    columns = [*(SCORE_PREFIX + name for name in _scores(settings)), "split", "bytes"]
    columns += [PHASE] if settings.phase else []
    columns += ["language"] if any(bounds.per for _, bounds in _rules(settings)) else []
    columns += ["cluster"] if settings.sort else []
    return pa.Table.from_batches(read_documents(corpus, None, columns))


def _strings(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist(), object)


def _write(job: Job, decision: Decision, kept: np.ndarray, sizes: np.ndarray, order: np.ndarray | None) -> None:
    """Write the documents to keep with their phases, and the beginnings of the others with their reasons.

    Args:
        job: the stage.
        decision, kept, sizes: of all documents, N.
        order: the order to write them in; None: as they come.
    """
    corpus = job.inputs["data"].path
    for old in document_parts(job.out.path):
        old.unlink()
    writer, at = DocumentWriter(job.out.path), 0
    by_score = None if order is None else SortedDocuments(writer, order[kept[order]], sizes, job.out / _SORTED)
    columns = [name for name in columns_of(corpus) if name != PHASE or decision.phases is None]
    with (
        atomic_open(job.out / "dropped.parquet") as file,
        pq.ParquetWriter(file, DROPPED, compression="zstd") as dropped,
        job.display.bar("selecting", len(kept), "documents") as bar,
    ):
        for batch in read_documents(corpus, None, columns):
            rows = slice(at, at + batch.num_rows)
            at += batch.num_rows
            table, mask = pa.Table.from_batches([batch]), pa.array(kept[rows])
            if decision.phases is not None:
                table = table.append_column(PHASE, pa.array(decision.phases[rows], pa.string()))
            if by_score is None:
                writer.write(table.filter(mask))
            else:
                by_score.write(table, rows.start)
            dropped.write_table(_dropped(table, decision.reasons[rows]).filter(pc.invert(mask)))
            bar.advance(batch.num_rows)
    (by_score or writer).flush()


def _dropped(table: pa.Table, reasons: np.ndarray) -> pa.Table:
    beginning = pc.utf8_slice_codeunits(table["text"], 0, SAMPLE_CHARACTERS)
    places = [table[name] for name in ("source", "path", "offset")]
    return pa.table([*places, pa.array(reasons, pa.string()), table["bytes"], beginning], names=DROPPED.names).cast(
        DROPPED
    )


def _numbers(reasons: np.ndarray) -> dict[str, int]:
    """Reason -> dropped documents, by name."""
    names, numbers = np.unique([r for r in reasons if r is not None], return_counts=True)
    return dict(zip(names.tolist(), numbers.tolist(), strict=True))


def _thresholds(decision: Decision) -> list[tuple[str, str, float]]:
    """(rule, low | high | below, score) of every finite threshold."""
    both = [(rule, side, value) for rule, i in decision.intervals.items() for side, value in i._asdict().items()]
    return [(rule, side, value) for rule, side, value in both if np.isfinite(value)]


def _funnel(decision: Decision, kept: np.ndarray, sizes: np.ndarray, scores: dict[str, np.ndarray]) -> dict[str, Any]:
    """Counts as in the funnel of a corpus stage; and of each score a histogram with the thresholds."""

    def pair(rows: np.ndarray) -> dict[str, int]:
        return {"documents": int(rows.sum()), "bytes": int(sizes[rows].sum())}

    reasons, histograms = decision.reasons, {}
    for name, values in scores.items():
        known = values[~np.isnan(values)]
        counts, edges = np.histogram(known, HISTOGRAM_BINS) if len(known) else (np.zeros(0, int), np.zeros(0))
        rules = [t for t in _thresholds(decision) if t[0].partition("/")[0].rpartition(".")[2] == name]
        histograms[name] = {"counts": counts.tolist(), "edges": edges.tolist(), "thresholds": rules}
    return {
        "in": pair(np.ones(len(kept), bool)),
        "kept": pair(kept),
        "dropped": {reason: pair(reasons == reason) for reason in _numbers(reasons)},
        "phases": {}
        if decision.phases is None
        else {name: pair(decision.phases == name) for name in dict.fromkeys(p for p in decision.phases if p)},
        "scores": histograms,
    }
