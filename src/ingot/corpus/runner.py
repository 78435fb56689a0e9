"""The corpus pipeline: read -> prepare (pure, on threads) -> deduplicate -> split -> write, in document order.

Any engine can map `prepare`; threads suffice because Polars, numpy and hashlib release the GIL. Deduplication and the
split depend on the order and run in this loop. The result is byte-identical for any number of workers.

Repeated documents (`repeat`) are appended after all others: beside its original, a copy could be packed into the same
window and teach the model to copy.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ingot.core.errors import UserError, shortened
from ingot.core.events import Display, EventLog, size
from ingot.corpus import contents, dedup, filters, holdout, near_duplicates
from ingot.corpus.contamination import FOUND
from ingot.corpus.documents import SCHEMA, DocumentWriter, document_parts, read_documents
from ingot.corpus.funnel import Funnel
from ingot.corpus.prepare import KEY, Loaded, load, prepare
from ingot.corpus.readers.locate import not_read
from ingot.corpus.readers.read import read
from ingot.corpus.readers.walk import describe
from ingot.corpus.settings import CorpusSettings

A = TypeVar("A")
B = TypeVar("B")

_SPOOL = ".kept.tmp"


def build(settings: CorpusSettings, out: Path, display: Display, log: EventLog) -> dict[str, int]:
    """Write the corpus to `out`: documents-*.parquet, dropped.parquet, quarantine.jsonl, funnel.json.

    Args:
        settings: the stage's settings.
        out: the stage's directory; the output of an interrupted run is replaced.
        display: the terminal.
        log: receives one `corpus` event with the result.

    Returns:
        Counts: documents, characters, bytes (kept, without repeats), train_*, val_* (written, with repeats), input_*,
        dropped_documents, quarantined_documents, cut_documents, pii_*.

    Raises:
        UserError: an invalid source or filter, or no training document left.
    """
    _remove_old(out)
    loaded = load(settings, display)
    try:
        with Funnel(out) as funnel:
            tally = _write_kept(settings, loaded, out, funnel, display)
            _check_nonempty(settings, funnel)
            holdout.check_split(settings.holdout, tally["train_documents"], tally["val_documents"])
    except UserError:
        _remove_old(out)
        raise
    result = {**_summary(funnel), **tally}
    log.write("corpus", step=1, **result)
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
    shutil.rmtree(out / _SPOOL, ignore_errors=True)
    for part in document_parts(out):
        part.unlink()
    for name in (near_duplicates.PAIRS, FOUND):
        (out / name).unlink(missing_ok=True)


def ordered_map(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """`map` on threads, results in input order, with at most `2 * workers` items in flight."""
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        in_flight: deque[Future[B]] = deque()
        try:
            for item in items:
                in_flight.append(pool.submit(function, item))
                if len(in_flight) >= 2 * workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        finally:
            for future in in_flight:
                future.cancel()


def _prepared_documents(
    settings: CorpusSettings,
    loaded: Loaded,
    funnel: Funnel,
    display: Display,
) -> Iterator[pa.Table]:
    """All documents, in order, as `prepare` returns them, with exact duplicates marked."""
    seen, kept = dedup.Seen(), 0
    raw = read(settings, funnel.quarantine, funnel.count_fields)
    with display.bar("documents", unit="documents") as bar:
        one = partial(prepare, settings=settings, loaded=loaded)
        for table in ordered_map(one, raw, settings.workers):
            if settings.dedup.exact:
                table = _drop_duplicates(table, seen)
            kept += table["drop_reason"].null_count
            yield table
            bar.advance(table.num_rows, kept=f"{kept:,}")


def _kept_documents(
    settings: CorpusSettings,
    loaded: Loaded,
    out: Path,
    funnel: Funnel,
    display: Display,
) -> Iterator[pa.Table]:
    """Documents to keep, in order, as tables of `SCHEMA` with a null `split`; counts all documents in the funnel."""
    tables = _prepared_documents(settings, loaded, funnel, display)
    if settings.dedup.minhash:
        tables = near_duplicates.mark(tables, settings.dedup.minhash, out, display)
    for table in tables:
        funnel.count(table)
        if loaded.items is not None:
            funnel.count_contamination(table, loaded.items)
        kept = table.filter(pc.is_null(table["drop_reason"]))
        yield kept.append_column("split", pa.nulls(kept.num_rows, pa.string())).select(SCHEMA.names).cast(SCHEMA)


def _drop_duplicates(table: pa.Table, seen: dedup.Seen) -> pa.Table:
    """Set the reason `exact_duplicate` for documents that have no other reason and equal an earlier kept document."""
    is_kept = pc.is_null(table["drop_reason"])
    repeated = iter(seen.repeated(table[KEY].filter(is_kept).to_pylist()))
    is_duplicate = [kept and next(repeated) for kept in is_kept.to_pylist()]
    reasons = pc.if_else(
        pa.array(is_duplicate, pa.bool_()), pa.scalar(dedup.EXACT_DUPLICATE, pa.large_string()), table["drop_reason"]
    )
    return table.set_column(table.schema.get_field_index("drop_reason"), "drop_reason", reasons)


def _write_kept(
    settings: CorpusSettings,
    loaded: Loaded,
    out: Path,
    funnel: Funnel,
    display: Display,
) -> dict[str, int]:
    """Split and write the kept documents; returns the counts of `build` that concern them."""
    kept = _kept_documents(settings, loaded, out, funnel, display)
    tally = dict.fromkeys([f"{s}_{u}" for s in ("train", "val") for u in ("documents", "characters", "bytes")], 0)
    writer = DocumentWriter(out)
    cut = 0
    if settings.holdout.by == "tail":
        spool = out / _SPOOL
        splitter = holdout.TailSplitter(_spool(kept, spool), settings.holdout.fraction, settings.format == "text")
        for batch in _read_spool(spool):
            _write(splitter.split(batch), writer, tally)
        shutil.rmtree(spool)
        cut = splitter.cut_documents
    else:
        for table in kept:
            _write(holdout.split_by_hash(table, settings.holdout), writer, tally)
    unique = {u: tally[f"train_{u}"] + tally[f"val_{u}"] for u in ("documents", "characters", "bytes")}
    unique["documents"] -= cut
    parts = writer.flush()
    _write_repeats(settings, out, parts, writer, tally)
    writer.flush()
    return {**unique, **tally, "cut_documents": cut}


def _spool(kept: Iterator[pa.Table], spool: Path) -> int:
    """Write documents to a temporary directory, because the tail's start depends on their total number of characters.

    Returns:
        The total number of characters.
    """
    spool.mkdir()
    writer = DocumentWriter(spool)
    characters = 0
    for table in kept:
        characters += pc.sum(pc.utf8_length(table["text"])).as_py() or 0
        writer.write(table)
    writer.flush()
    return characters


def _read_spool(spool: Path) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([b]) for b in read_documents(spool)) if document_parts(spool) else iter(())


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


def _summary(funnel: Funnel) -> dict[str, int]:
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
    dropped = {r: funnel.total.dropped[r][1] for r in filters.QUALITY_REASONS if r in funnel.total.dropped}
    total = sum(count for _, count in (funnel.total.kept, *funnel.total.dropped.values()))
    if 2 * sum(dropped.values()) <= total:
        return None
    main_reason = max(dropped, key=dropped.__getitem__)
    return (
        f"the bounds of `quality` dropped {sum(dropped.values()) / total:.0%} of the text, most of it as {main_reason} "
        '(see dropped.parquet); set other bounds, or quality = "none", to keep it'
    )


def _show_summary(display: Display, funnel: Funnel, result: dict[str, int]) -> None:
    removed = {reason: documents for reason, (documents, _) in funnel.total.dropped.items()}
    removed |= {"quarantined": result["quarantined_documents"]} if result["quarantined_documents"] else {}
    reasons = ", ".join(f"{reason} {documents:,}" for reason, documents in removed.items())
    display.notify(
        f"{result['documents']:,} of {result['input_documents']:,} documents kept ({size(result['bytes'])}), "
        f"{result['val_documents']:,} held out for validation" + (f"; removed: {reasons}" if reasons else "")
    )
