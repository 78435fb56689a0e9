"""Drops near-duplicates: documents that share most of their text with one that is kept (`minhash.py`).

All documents must be seen before the first is kept or dropped, so they wait in a temporary directory with their
signatures; text is not held in memory.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.artifact import atomic_open
from ingot.core.events import Display
from ingot.corpus.minhash import Match, find, signatures
from ingot.corpus.settings import MinHashSettings

NEAR_DUPLICATE = "near_duplicate"
"""The `drop_reason` of a document that resembles one that is kept."""
SIGNATURE = "_signature"
PAIRS = "near_duplicates.parquet"
"""File of a corpus stage: each dropped near-duplicate with the document that is kept for it, and their similarity."""
SAMPLE_CHARACTERS = 400
_SPOOL = ".near.tmp"
_PLACE = pa.schema({"source": pa.string(), "path": pa.string(), "offset": pa.int64(), "text": pa.string()})


def signature_column(texts: pl.Series, settings: MinHashSettings) -> pa.Array:
    """The signatures of texts as a column."""
    flat = signatures(texts, settings.bands * settings.rows)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 * flat.shape[1]), len(flat), [None, pa.py_buffer(flat)])


def mark(tables: Iterable[pa.Table], settings: MinHashSettings, out: Path, display: Display) -> Iterator[pa.Table]:
    """Set the reason `near_duplicate` for documents that resemble another one.

    All documents are read, and wait in a temporary directory of `out`, before the first is returned. Writes `PAIRS`.

    Args:
        tables: documents with a signature each; those that have a reason are not compared.
        settings: of the signatures.
        out: the stage's directory.
        display: the terminal.
    """
    spool = out / _SPOOL
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    try:
        sizes = _spool(tables, spool)
        width = settings.bands * settings.rows
        stored = np.memmap(spool / "signatures", np.uint32, "r", shape=(len(sizes), width)) if len(sizes) else None
        match = find(np.zeros((0, width), np.uint32) if stored is None else stored, sizes, settings)
        _write_pairs(spool, match, out)
        first = 0
        with display.bar("near-duplicates", len(sizes), "documents") as bar:
            for table in _read_spool(spool):
                numbers = np.arange(first, first + table.num_rows)
                first += table.num_rows
                near = pa.array(match.kept_for[numbers] != numbers)
                reasons = pc.if_else(near, pa.scalar(NEAR_DUPLICATE, pa.large_string()), table["drop_reason"])
                bar.advance(table.num_rows)
                yield table.set_column(table.schema.get_field_index("drop_reason"), "drop_reason", reasons)
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def _spool(tables: Iterable[pa.Table], spool: Path) -> np.ndarray:
    """Write documents and signatures to files; the sizes of the documents."""
    sizes, writer = [np.zeros(0, np.int64)], None
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (spool / "documents").open("wb") as documents, (spool / "signatures").open("wb") as file:
        for table in tables:
            dropped = pc.is_valid(table["drop_reason"]).to_numpy(zero_copy_only=False)
            width = table.schema.field(SIGNATURE).type.byte_width
            column = table[SIGNATURE].combine_chunks()
            flat = np.frombuffer(column.buffers()[1], np.uint8)[
                column.offset * width : (column.offset + len(column)) * width
            ]
            flat = np.where(dropped[:, None], 0, flat.reshape(len(column), width)).astype(np.uint8)
            file.write(flat.tobytes())
            sizes.append(table["bytes"].to_numpy())
            rest = table.drop_columns([SIGNATURE])
            writer = writer or pa.ipc.new_stream(documents, rest.schema, options=options)
            writer.write_table(rest)
        if writer is not None:
            writer.close()
    return np.concatenate(sizes)


def _read_spool(spool: Path) -> Iterator[pa.Table]:
    if (spool / "documents").stat().st_size:
        with (spool / "documents").open("rb") as file, pa.ipc.open_stream(file) as reader:
            yield from (pa.Table.from_batches([batch]) for batch in reader)


def _write_pairs(spool: Path, match: Match, out: Path) -> None:
    """Write where each dropped near-duplicate and the document kept for it come from, and how both begin."""
    dropped = np.flatnonzero(match.kept_for != np.arange(len(match.kept_for)))
    wanted = np.unique(np.concatenate([dropped, match.kept_for[dropped]]))
    places, first = [_PLACE.empty_table()], 0
    for table in _read_spool(spool):
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + table.num_rows)] - first
        chosen = table.select(["source", "path", "offset", "text"]).take(inside)
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
