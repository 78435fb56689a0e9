"""Reads rows from tables: CSV and TSV with a header, and Parquet.

CSV is parsed by Python's `csv` module in strict mode: the readers of pyarrow and Polars stop at the first bad byte,
limit a row to a block, and do not report line numbers. Parquet is read by row group through small buffers, so that
memory does not depend on the file's size; an undecodable row group loses only its own rows, which are counted.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.corpus.readers.files import BadRow, Damaged, Row, lines, unreadable

MAX_FIELD_CHARACTERS = 64 << 20
"""Maximum length of a CSV field; a longer one means that a quote was not closed."""
MAX_REWINDS = 1000
"""Maximum number of rewinds per file after rows with a stray quote."""


def csv_rows(file: Path, delimiter: str) -> Iterator[Row]:
    """One dict of strings per row, keys from the header; quoted fields may contain line ends. Raises Damaged."""
    records = _records(file, delimiter)
    if (first := next(records, None)) is None:
        return
    header = _header(first[1])
    for number, (line, fields) in enumerate(records):
        yield Row(fields if isinstance(fields, BadRow) else _named(header, fields), number, line)


def _records(file: Path, delimiter: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """(number of its first line, fields or `BadRow`) of each row, including the header."""
    text = _Lines(file)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    csv.field_size_limit(MAX_FIELD_CHARACTERS)  # the default of 131,072 is too small for documents
    while True:
        line = text.number + 1
        record: list[str] | BadRow
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = text.number
            if text.rewind():
                reader = csv.reader(text, delimiter=delimiter, strict=True)
                record = BadRow(f"malformed table in line {line}: {error}")
            else:
                record = BadRow(f"malformed table in lines {line} to {last}, which are lost: {error}")
        if error := text.end_row():
            record = BadRow(f"byte {error.start} of the line (0x{error.object[error.start]:02x}) is not UTF-8")
        if record:
            yield line, record


class _Lines(Iterator[str]):
    """Decoded lines that can be rewound to the second line of the current row.

    A stray quote extends its row to the next quote, however far away; after a rewind only the quote's line is lost.
    """

    def __init__(self, file: Path):
        self._lines = lines(file)
        self._pending: deque[tuple[str, UnicodeDecodeError | None]] = deque()
        self._row: list[tuple[str, UnicodeDecodeError | None]] = []
        self._rewinds_left = MAX_REWINDS
        self.number = 0
        """Number of the last line read, from 1."""

    def __next__(self) -> str:
        line = self._pending.popleft() if self._pending else self._read()
        self._row.append(line)
        self.number += 1
        return line[0]

    def _read(self) -> tuple[str, UnicodeDecodeError | None]:
        _, offset, data = next(self._lines)
        try:
            return data.decode("utf-8-sig" if offset == 0 else "utf-8") + "\n", None
        except UnicodeDecodeError as error:
            return data.decode(errors="replace") + "\n", error

    def end_row(self) -> UnicodeDecodeError | None:
        """End the current row. Returns the error of its first line that is not UTF-8, or None."""
        error = next((error for _, error in self._row if error), None)
        self._row = []
        return error

    def rewind(self) -> bool:
        """Rewind to the second line of the current row. False if `MAX_REWINDS` is exhausted."""
        if len(self._row) > 1:
            if not self._rewinds_left:
                return False
            self._rewinds_left -= 1
            self._pending.extendleft(reversed(self._row[1:]))
            self.number -= len(self._row) - 1
            del self._row[1:]
        return True


def _named(header: list[str], fields: list[str]) -> dict[str, str] | BadRow:
    if len(fields) != len(header):
        return BadRow(f"found {len(fields)} fields, expected {len(header)} ({', '.join(header)})")
    return dict(zip(header, fields, strict=True))


def _header(fields: list[str] | BadRow) -> list[str]:
    if isinstance(fields, BadRow):
        raise Damaged(f"the header cannot be read: {fields}; save the file as UTF-8 with a line of column names")
    return _check_unique(fields, "the header")


def _check_unique(names: list[str], where: str) -> list[str]:
    """The column names unchanged. Raises Damaged if two are equal."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise Damaged(f"{where} names column '{repeated[0]}' more than once; rename one of them")
    return names


class LostRows(NamedTuple):
    """A range of table rows that cannot be decoded."""

    row: int
    """Number of the first row, from 0."""
    rows: int
    reason: str


def parquet_columns(file: Path) -> tuple[pa.Schema, int]:
    """The schema and the number of rows. Raises Damaged."""
    with _open(file) as table:
        return table.schema_arrow, table.metadata.num_rows


def parquet_batches(
    file: Path, columns: list[str] | None, rows: int, size: int
) -> Iterator[tuple[int, pa.RecordBatch] | LostRows]:
    """Yield (number of the first row from 0, batch).

    Args:
        file: a Parquet file without an outer compression.
        columns: names of the columns to read; None reads all.
        rows: maximum number of rows per batch.
        size: approximate maximum number of bytes per batch.

    Raises:
        Damaged: not a Parquet file.
    """
    with _open(file) as table:
        start = 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            batch_rows = max(1, min(rows, size * group.num_rows // max(group.total_byte_size, 1)))
            done = 0
            try:
                for batch in table.iter_batches(batch_rows, [number], columns, use_threads=False):
                    yield start + done, batch
                    done += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                lost = group.num_rows - done
                reason = f"row group {number} cannot be decoded from row {start + done + 1} on ({_first_line(error)})"
                yield LostRows(start + done, lost, f"{reason}, {lost:,} rows lost")
            start += group.num_rows


def parquet_rows(file: Path, rows: int, size: int) -> Iterator[Row | LostRows]:
    """One dict of Python values per row. Raises Damaged."""
    _check_unique(parquet_columns(file)[0].names, "the table")
    for item in parquet_batches(file, None, rows, size):
        if isinstance(item, LostRows):
            yield item
            continue
        start, batch = item
        try:
            values = batch.to_pylist()
        except (ValueError, OverflowError, pa.ArrowException):
            values = [_one_row(batch, row) for row in range(batch.num_rows)]
        for number, value in enumerate(values, start):
            yield Row(value, number, row=number + 1)


def _one_row(batch: pa.RecordBatch, row: int) -> object:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(f"a string of this row is not UTF-8 (0x{error.object[error.start]:02x})")
    except (ValueError, OverflowError, pa.ArrowException):
        return {name: _value(batch.column(name)[row]) for name in batch.schema.names}


def _value(scalar: pa.Scalar) -> object:
    """The Python value; a string for types without one, such as timestamps in nanoseconds."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        try:
            return str(scalar.cast(pa.int64()).as_py())
        except pa.ArrowException:
            return f"({scalar.type})"


def is_text(kind: pa.DataType) -> bool:
    """Whether the type can hold text. Binary counts because some writers do not mark strings as UTF-8."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in (*text, pa.types.is_binary, pa.types.is_large_binary))


def parquet_texts(column: pa.Array) -> tuple[pa.Array, list[tuple[int, str]]]:
    """The column as strings (null if invalid), and (row, reason) for each null."""
    try:
        texts = column.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        texts = pa.concat_arrays([_one_text(column.slice(row, 1)) for row in range(len(column))])
    nulls = np.flatnonzero(pc.is_null(texts).to_numpy(zero_copy_only=False))
    has_value = column.is_valid()
    return texts, [(int(row), "not UTF-8" if has_value[row].as_py() else "null, expected a string") for row in nulls]


def _one_text(value: pa.Array) -> pa.Array:
    try:
        text = value.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        return pa.nulls(1, pa.string())
    return text


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
    except (PermissionError, FileNotFoundError) as error:
        raise unreadable(file, error) from None
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"not a valid Parquet file ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
