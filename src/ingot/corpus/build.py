"""The corpus pipeline, in two phases.

1. `gather`: workers read and prepare partitions, each alone, and spool what they made (`spool`, `runners`).
2. `verdicts` looks at columns of all documents, without their text, and drops duplicates. Then the text is read once,
   in the order of the sources, split and written.

The result is byte-identical for any runner and any number of workers; a killed run continues from the spool.

Repeated documents (`repeat`) are appended after all others: beside its original, a copy could be packed into the same
window and teach the model to copy.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.core.errors import UserError, shortened
from ingot.core.events import Display, EventLog, size
from ingot.corpus import contents, filters, holdout, instructions, near_duplicates, planted
from ingot.corpus.contamination import CONTAMINATED, FOUND, read_items
from ingot.corpus.documents import SCHEMA, DocumentWriter, document_parts, read_documents
from ingot.corpus.funnel import Funnel
from ingot.corpus.gather import prepare_all
from ingot.corpus.partitions import plan
from ingot.corpus.pii_audit import AUDIT, Audit
from ingot.corpus.prepare import Loaded, load
from ingot.corpus.readers.locate import not_read
from ingot.corpus.readers.walk import describe
from ingot.corpus.settings import CorpusSettings
from ingot.corpus.spool import SPOOL, Spool
from ingot.corpus.verdicts import Verdicts, decide


def build(settings: CorpusSettings, out: Path, display: Display, log: EventLog) -> dict[str, Any]:
    """Write the corpus to `out`: documents-*.parquet, dropped.parquet, quarantine.jsonl, funnel.json.

    Args:
        settings: the stage's settings.
        out: the stage's directory; the output of an interrupted run is replaced.
        display: the terminal.
        log: receives one `corpus` event with the result.

    Returns:
        Counts: documents, characters, bytes (kept, without repeats), train_*, val_* (written, with repeats), input_*,
        dropped_documents, quarantined_documents, cut_documents, pii_*; with `check.plant` planted_*.

    Raises:
        UserError: an invalid source or filter, or no training document left.
    """
    _remove_old(out)
    loaded = load(settings, display)
    counted = read_items(settings.overlap_with) if settings.overlap_with else None
    partitions = plan(settings)
    spool = Spool(out / SPOOL, partitions, settings)
    try:
        with Funnel(out, filters.rules_of(loaded.filters, settings.bounds)) as funnel:
            prepare_all(settings, partitions, spool, funnel, display)
            verdicts = decide(settings, spool, out, display)
            audit = Audit(settings.pii_audit) if settings.pii_audit else None
            train = _train_characters(settings, spool, verdicts) if settings.holdout.by in holdout.BY_SIZE else None
            tally = _write_kept(settings, _kept_documents(spool, verdicts, loaded, funnel, audit), train, out)
            _check_nonempty(settings, funnel)
            is_text = settings.format == "text"
            holdout.check_split(settings.holdout, tally["train_documents"], tally["val_documents"], is_text)
    except UserError:
        _remove_old(out)
        spool.remove()
        raise
    spool.remove()
    result = {**_summary(funnel), **tally}
    if audit is not None:
        audit.write(out)
    if settings.check.plant:
        result |= planted.check(settings, loaded, out, settings.check.plant)
    if settings.format != "text":
        instructions.describe(settings, out, funnel.total.dropped.get(CONTAMINATED, (0, 0))[0], counted)
    log.write("corpus", step=1, **result)
    log.write("cost", step=1, seconds={step: round(seconds, 3) for step, seconds in funnel.by_rule.seconds.items()})
    log.flush()
    _show_summary(display, funnel, result)
    if funnel.first_quarantined:
        display.notify(
            f"{funnel.first_quarantined.message()}; quarantined {result['quarantined_documents']:,} rows and files, "
            "see quarantine.jsonl"
        )
    if funnel.not_judged:
        display.notify(
            f"{funnel.not_judged:,} documents are source code or not in English: the published rules did not judge them"
        )
    for notice in _field_notices(funnel, settings.format):
        display.notify(notice)
    if notice := holdout.share_notice(settings.holdout, result["val_bytes"], result["bytes"], is_text):
        display.notify(notice)
    if warning := _quality_warning(funnel):
        display.notify(warning)
    for source in settings.sources:
        if skipped := not_read(source):
            display.notify(f"{source.path}: not read: {describe(skipped)}")
    for reason, (number, _) in funnel.total.dropped.items():
        if _is_malformed(settings, reason):
            display.notify(f"{_first_dropped(funnel, reason)}; dropped {number:,} such documents, see dropped.parquet")
    return result


def _remove_old(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for part in document_parts(out):
        part.unlink()
    for name in (near_duplicates.PAIRS, FOUND, planted.PLANTED, instructions.INSTRUCTIONS, AUDIT):
        (out / name).unlink(missing_ok=True)


def _kept_documents(
    spool: Spool, verdicts: Verdicts, loaded: Loaded, funnel: Funnel, audit: Audit | None
) -> Iterator[pa.Table]:
    """Documents to keep, in order, as tables of `SCHEMA` with a null `split`; counts all documents in the funnel."""
    first = 0
    for prepared in spool.tables():
        table = verdicts.apply(prepared, first)
        first += table.num_rows
        funnel.count(table)
        if audit is not None:
            audit.add(table)
        if loaded.items is not None:
            funnel.count_contamination(table, loaded.items)
        kept = table.filter(pc.is_null(table["drop_reason"]))
        yield kept.append_column("split", pa.nulls(kept.num_rows, pa.string())).select(SCHEMA.names).cast(SCHEMA)


def _train_characters(settings: CorpusSettings, spool: Spool, verdicts: Verdicts) -> np.ndarray:
    """`holdout.train_characters` of the documents to keep."""
    clusters, characters, first = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for prepared in spool.tables(verdicts.columns(["drop_reason", "cluster", "text"])):
        table = verdicts.apply(prepared, first)
        first += table.num_rows
        kept = table.filter(pc.is_null(table["drop_reason"]))
        clusters.append(kept["cluster"].to_numpy())
        characters.append(pc.utf8_length(kept["text"]).to_numpy().astype(np.int64))
    is_divisible = settings.format == "text"
    return holdout.train_characters(
        settings.holdout, np.concatenate(clusters), np.concatenate(characters), is_divisible
    )


def _write_kept(
    settings: CorpusSettings, kept: Iterator[pa.Table], train: np.ndarray | None, out: Path
) -> dict[str, int]:
    """Split and write the kept documents; returns the counts of `build` that concern them.

    Args:
        settings: the stage's settings.
        kept: tables of `SCHEMA`.
        train: characters of each of them that are trained on; None for a split by hash alone.
        out: the stage's directory.
    """
    tally = dict.fromkeys([f"{s}_{u}" for s in ("train", "val") for u in ("documents", "characters", "bytes")], 0)
    writer = DocumentWriter(out)
    done = cut = 0
    for table in kept:
        if train is None:
            split = holdout.split_by_hash(table, settings.holdout)
        else:
            split = holdout.split_at(table, train[done : done + table.num_rows])
        done, cut = done + table.num_rows, cut + split.num_rows - table.num_rows
        _write(split, writer, tally)
    unique = {u: tally[f"train_{u}"] + tally[f"val_{u}"] for u in ("documents", "characters", "bytes")}
    unique["documents"] -= cut
    parts = writer.flush()
    _write_repeats(settings, out, parts, writer, tally)
    writer.flush()
    return {**unique, **tally, "cut_documents": cut}


def _write(table: pa.Table, writer: DocumentWriter, tally: dict[str, int]) -> None:
    writer.write(table)
    characters, sizes = pc.utf8_length(table["text"]).to_numpy(), table["bytes"].to_numpy()
    for split in ("train", "val"):
        rows = pc.equal(table["split"], split).to_numpy()
        tally[f"{split}_documents"] += int(rows.sum())
        tally[f"{split}_characters"] += int(characters[rows].sum())
        tally[f"{split}_bytes"] += int(sizes[rows].sum())


def _write_repeats(
    settings: CorpusSettings, out: Path, parts: int, writer: DocumentWriter, tally: dict[str, int]
) -> None:
    """Append the training documents of sources with `repeat` > 1 again, one complete pass over all of them at a time.

    Args:
        settings, out, writer, tally: as in `_write_kept`.
        parts: number of files already written, which are the ones to repeat.
    """
    repeats = {s.path: s.repeat for s in settings.sources}
    for done in range(1, max(repeats.values()) if parts else 1):
        sources = pa.array([path for path, repeat in repeats.items() if repeat > done])
        for batch in read_documents(out, "train", parts=parts):
            _write(pa.Table.from_batches([batch.filter(pc.is_in(batch["source"], sources))]), writer, tally)


def _check_nonempty(settings: CorpusSettings, funnel: Funnel) -> None:
    """Raise UserError for a source without documents, or a corpus of which none is kept."""
    for source in settings.sources:
        counts = funnel.sources[source.path].summary()
        if not counts["in"]["documents"]:
            raise UserError(f"sources: '{source.path}' contains no document; put text into it or remove it")
    if funnel.total.kept[0]:
        return
    counts = funnel.total.summary()
    reasons = ", ".join(f"{reason} {pair['documents']}" for reason, pair in counts["dropped"].items())
    if counts["quarantined"]["documents"]:
        reasons += f", quarantined {counts['quarantined']['documents']}"
    malformed = [reason for reason in counts["dropped"] if _is_malformed(settings, reason)]
    problems = "".join(f"; {_first_dropped(funnel, reason)}" for reason in malformed)
    advice = "fix the rows" if malformed else 'add text, or relax the filters: quality = "none" sets no bounds'
    raise UserError(f"sources: kept none of {counts['in']['documents']} documents ({reasons}){problems}; {advice}")


def _is_malformed(settings: CorpusSettings, reason: str) -> bool:
    """Whether the reason is a defect of the row and not a filter of the recipe."""
    return settings.format != "text" and reason in contents.PROBLEMS


def _first_dropped(funnel: Funnel, reason: str) -> str:
    path, offset = funnel.first[reason]
    return f"{path}, document at {offset:,}: {contents.PROBLEMS[reason]}"


def _summary(funnel: Funnel) -> dict[str, Any]:
    total = funnel.total.summary()
    return {
        "input_documents": total["in"]["documents"],
        "input_bytes": total["in"]["bytes"],
        "dropped_documents": sum(pair["documents"] for pair in total["dropped"].values()),
        "quarantined_documents": total["quarantined"]["documents"],
        **{f"pii_{kind}": count for kind, count in total["pii"].items()},
    }


def _field_notices(funnel: Funnel, format: str) -> Iterator[str]:
    """What was kept beside the documents: metadata by name, and with their counts fields whose use is not known."""
    column = "metadata" if format == "text" else "extra"
    metadata = [name for (name, use), _ in funnel.fields.most_common() if use == "metadata"]
    if metadata:
        yield f"kept as metadata beside the documents (column `{column}`): {_listed(metadata)}"
    others = [f"{name} ({rows:,} rows)" for (name, use), rows in funnel.fields.most_common() if use == "kept"]
    if others:
        yield (
            f"kept beside the documents (column `{column}`) and not part of their text: {_listed(others)}; if one "
            "belongs to the text, name its role in `fields`"
        )


def _listed(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shortened(name) for name in names[:limit]) + more


def _quality_warning(funnel: Funnel) -> str | None:
    """A warning if the quality bounds dropped more than half of the bytes, which may be unintended."""
    dropped = {r: funnel.total.dropped[r][1] for r in filters.QUALITY_RULES if r in funnel.total.dropped}
    total = sum(count for _, count in (funnel.total.kept, *funnel.total.dropped.values()))
    if 2 * sum(dropped.values()) <= total:
        return None
    main_reason = max(dropped, key=dropped.__getitem__)
    return (
        f"the bounds of `quality` dropped {sum(dropped.values()) / total:.0%} of the text, most of it as {main_reason} "
        '(see dropped.parquet); set other bounds, or quality = "none", to keep it'
    )


def _show_summary(display: Display, funnel: Funnel, result: dict[str, Any]) -> None:
    removed = {reason: documents for reason, (documents, _) in funnel.total.dropped.items()}
    removed |= {"quarantined": result["quarantined_documents"]} if result["quarantined_documents"] else {}
    reasons = ", ".join(f"{reason} {documents:,}" for reason, documents in removed.items())
    display.notify(
        f"{result['documents']:,} of {result['input_documents']:,} documents kept ({size(result['bytes'])}), "
        f"{result['val_documents']:,} held out for validation ({result['val_bytes'] / result['bytes']:.1%} of the text)"
        + (f"; removed: {reasons}" if reasons else "")
    )
