"""The reference loop: read -> prepare (pure, on threads) -> exact duplicates -> split -> write, in document order.

`prepare` takes an Arrow batch and returns an Arrow batch: scores and decisions are columns, nothing is removed there.
So any engine can map it (Polars and hashlib let go of the interpreter's lock, hence threads), and what needs an order,
duplicates and the split, happens once in this loop. The result is the same to the byte for any number of workers.

Repeats are appended after all documents rather than written beside their original, where packing would put a text and
its copy into one window and teach copying.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus import contents, dedup, filters, holdout
from ingot.corpus.documents import SCHEMA, DocumentWriter, document_parts, read_documents
from ingot.corpus.funnel import Funnel
from ingot.corpus.readers.locate import left_out
from ingot.corpus.readers.read import read
from ingot.corpus.settings import CorpusSettings

A = TypeVar("A")
B = TypeVar("B")

_SPOOL = ".kept.tmp"
_KEY = "_key"


def build(settings: CorpusSettings, out: Path, display: Display, log: EventLog) -> dict[str, int]:
    """Make the corpus in `out`: documents, dropped.parquet, quarantine.jsonl, funnel.json.

    Args:
        settings: of the stage.
        out: the stage's directory; what an interrupted run left there is replaced.
        display: bars and lines for people.
        log: gets one `corpus` event with the result.

    Returns:
        Flat counts: documents, characters, bytes (kept, each once), train_*, val_* (as written, repeats included),
        input_*, dropped_documents, quarantined_documents, cut_documents, pii_*.

    Raises:
        UserError: a bad source or filter, or nothing left to train on.
    """
    _remove_old(out)
    judges = filters.load_filters(settings.filters)
    try:
        with Funnel(out) as funnel:
            tally = _write_kept(settings, judges, out, funnel, display)
            _check_any(settings, funnel)
            holdout.check_split(settings.holdout, tally["train_documents"], tally["val_documents"])
    except UserError:
        _remove_old(out)
        raise
    result = {**_summary(funnel), **tally}
    log.write("corpus", step=1, **result)
    log.flush()
    _say(display, funnel, result)
    if severe := _severe(funnel):
        display.say(severe)
    for source in settings.sources:
        if files := left_out(source):
            display.say(
                f"{source.path}: {len(files):,} files were not read, such as {files[0]}, whose suffix says nothing of "
                "text; name a file itself, or a glob, and it is"
            )
    for reason, (number, _) in funnel.total.dropped.items():
        if _is_wrong(settings, reason):
            display.say(f"{_first(funnel, reason)}; {number:,} of this kind are left out, see dropped.parquet")
    return result


def _remove_old(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / _SPOOL, ignore_errors=True)
    for part in document_parts(out):
        part.unlink()


def prepare(batch: pa.Table, settings: CorpusSettings, judges: Mapping[str, filters.Filter]) -> pa.Table:
    """Clean and judge raw documents; pure.

    Args:
        batch: of schema `readers.RAW`.
        settings: of the stage.
        judges: the stage's own filters.

    Returns:
        As many rows, with the columns of `SCHEMA` but `split`, and raw_bytes, pii_*, drop_reason (null: go on), _key.
    """
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    raw_bytes = frame["text"].str.len_bytes().cast(pl.Int64)
    cleaned = contents.clean_documents(frame["text"], frame["extra"], settings)
    sizes = cleaned.texts.str.len_bytes().cast(pl.Int64)
    frame = frame.with_columns(
        text=cleaned.texts, extra=cleaned.extras, raw_bytes=raw_bytes, bytes=sizes, **cleaned.pii
    )
    frame = frame.with_columns(drop_reason=_reasons(frame, cleaned, settings, judges))
    table = frame.to_arrow()
    table = table.append_column("cluster", pa.array(dedup.clusters(cleaned.clusters), pa.uint64()))
    return table.append_column(_KEY, pa.array(cleaned.keys, pa.binary(16)))


def _reasons(
    frame: pl.DataFrame, cleaned: contents.Cleaned, settings: CorpusSettings, judges: Mapping[str, filters.Filter]
) -> pl.Series:
    """The first reason to drop each document, or null: those given, then quality, then the stage's own filters."""
    reasons = cleaned.reasons
    rows = reasons.is_null().arg_true()
    if not len(rows):
        return reasons
    if settings.bounds is not None and cleaned.squeezed is not None:
        frame = frame.with_columns(cleaned.squeezed.alias(filters.SQUEEZED))
    rest = frame[rows] if len(rows) < len(frame) else frame
    if settings.bounds is not None:
        rest = filters.measure(rest)
        reasons = reasons.scatter(rows, filters.judge(rest, settings.bounds))
    if judges:
        reasons = reasons.scatter(rows, reasons.gather(rows).fill_null(filters.apply_filters(rest, judges)))
    return reasons


def ordered_map(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """Like `map`, on threads, in order, with at most `2 * workers` items under way."""
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        under_way: deque[Future[B]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) >= 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _kept(
    settings: CorpusSettings, judges: Mapping[str, filters.Filter], funnel: Funnel, display: Display
) -> Iterator[pa.Table]:
    """Documents that stay, in order, as tables of `SCHEMA` whose split is still open; everything is counted."""
    seen = dedup.Seen()
    raw = read(settings, funnel.quarantine)
    with display.bar("documents", unit="documents") as bar:
        for table in ordered_map(partial(prepare, settings=settings, judges=judges), raw, settings.workers):
            if settings.dedup.exact:
                table = _drop_repeated(table, seen)
            funnel.count(table)
            kept = table.filter(pc.is_null(table["drop_reason"]))
            yield kept.append_column("split", pa.nulls(kept.num_rows, pa.string())).select(SCHEMA.names).cast(SCHEMA)
            bar.advance(table.num_rows, kept=f"{funnel.total.kept[0]:,}")


def _drop_repeated(table: pa.Table, seen: dedup.Seen) -> pa.Table:
    """Give `exact_duplicate` to documents that nothing else rejects and whose text came before among those kept."""
    open_rows = pc.is_null(table["drop_reason"])
    repeated = iter(seen.repeated(table[_KEY].filter(open_rows).to_pylist()))
    again = [is_open and next(repeated) for is_open in open_rows.to_pylist()]
    reasons = pc.if_else(
        pa.array(again, pa.bool_()), pa.scalar(dedup.EXACT_DUPLICATE, pa.large_string()), table["drop_reason"]
    )
    return table.set_column(table.schema.get_field_index("drop_reason"), "drop_reason", reasons)


def _write_kept(
    settings: CorpusSettings, judges: Mapping[str, filters.Filter], out: Path, funnel: Funnel, display: Display
) -> dict[str, int]:
    """Split and write; returns what was written."""
    kept = _kept(settings, judges, funnel, display)
    tally = dict.fromkeys([f"{s}_{u}" for s in ("train", "val") for u in ("documents", "characters", "bytes")], 0)
    writer = DocumentWriter(out)
    cut = 0
    if settings.holdout.by == "tail":
        spool = out / _SPOOL
        tail = holdout.Tail(_spool(kept, spool), settings.holdout.share, settings.format == "text")
        for batch in _spooled(spool):
            _write(tail.split(batch), writer, tally)
        shutil.rmtree(spool)
        cut = tail.cut
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
    """Write documents aside, because where the tail starts is known only at the end. Returns their characters."""
    spool.mkdir()
    writer = DocumentWriter(spool)
    characters = 0
    for table in kept:
        characters += pc.sum(pc.utf8_length(table["text"])).as_py() or 0
        writer.write(table)
    writer.flush()
    return characters


def _spooled(spool: Path) -> Iterator[pa.Table]:
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
    """Append the training documents of sources with `repeat` again, one whole round after the other."""
    repeats = {s.path: s.repeat for s in settings.sources}
    for done in range(1, max(repeats.values()) if parts else 1):
        wanted = pa.array([path for path, repeat in repeats.items() if repeat > done])
        for batch in read_documents(out, "train", parts=parts):
            _write(pa.Table.from_batches([batch.filter(pc.is_in(batch["source"], wanted))]), writer, tally)


def _check_any(settings: CorpusSettings, funnel: Funnel) -> None:
    """Refuse a corpus, or a source of it, without a document."""
    for source in settings.sources:
        counts = funnel.sources[source.path].summary()
        if not counts["in"]["documents"]:
            raise UserError(f"sources: '{source.path}' holds no document; put text into it or remove it")
    if funnel.total.kept[0]:
        return
    counts = funnel.total.summary()
    reasons = ", ".join(f"{reason} {pair['documents']}" for reason, pair in counts["dropped"].items())
    if counts["quarantined"]["documents"]:
        reasons += f", quarantined {counts['quarantined']['documents']}"
    wrong = "".join(f"; {_first(funnel, reason)}" for reason in counts["dropped"] if _is_wrong(settings, reason))
    way = "mend them" if wrong else 'add text, or loosen what drops it: quality = "none" judges nothing'
    raise UserError(f"sources: none of {counts['in']['documents']} documents is kept ({reasons}){wrong}; {way}")


def _is_wrong(settings: CorpusSettings, reason: str) -> bool:
    """Whether a row was dropped for what it is and not by somebody's choice."""
    return settings.format != "text" and reason in contents.PROBLEMS


def _first(funnel: Funnel, reason: str) -> str:
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


def _severe(funnel: Funnel) -> str | None:
    """A sentence where bounds of quality took more than half of the text, which their user may not have meant."""
    lost = {r: funnel.total.dropped[r][1] for r in filters.QUALITY_REASONS if r in funnel.total.dropped}
    whole = sum(size for _, size in (funnel.total.kept, *funnel.total.dropped.values()))
    if 2 * sum(lost.values()) <= whole:
        return None
    worst = max(lost, key=lost.__getitem__)
    return (
        f"the bounds of `quality` dropped {sum(lost.values()) / whole:.0%} of the text, most of it as {worst} (see "
        'dropped.parquet); set other bounds, or quality = "none", to keep it'
    )


def _say(display: Display, funnel: Funnel, result: dict[str, int]) -> None:
    reasons = (
        ", ".join(f"{reason} {counts[0]:,}" for reason, counts in funnel.total.dropped.items()) or "nothing dropped"
    )
    display.say(
        f"{result['documents']:,} of {result['input_documents']:,} documents kept, {result['bytes'] / 1e6:.1f} MB "
        f"({reasons}; quarantined {result['quarantined_documents']:,}); held out {result['val_documents']:,}"
    )
