"""Rows of tables: CSV and TSV with a header, and Parquet.

CSV is read by Python's own module, strictly: pyarrow's and Polars' readers end at the first bad byte, bound a row by
their block, and do not say in which line a row stood. Parquet is read row group by row group through small buffers, so
that memory does not depend on the file; a row group that cannot be decoded is lost alone, with its rows counted.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

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

MOST_FIELD = 64 << 20
"""Characters of one CSV field; more means that a quote was never closed."""
MOST_RETURNS = 1000
"""How often a file is read again from behind a line with a quote that opens by mistake."""


def csv_rows(file: Path, delimiter: str) -> Iterator[Row]:
    """One dict of strings a row, named by the header; quoted fields may hold line ends. Raises Damaged."""
    records = _records(file, delimiter)
    if (first := next(records, None)) is None:
        return
    header = _header(first[1])
    for number, (line, fields) in enumerate(records):
        yield Row(fields if isinstance(fields, BadRow) else _named(header, fields), number, line)


def _records(file: Path, delimiter: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """The fields of each row, the header's too, or what is wrong with it; with the number of its first line."""
    text = _Lines(file)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    csv.field_size_limit(MOST_FIELD)  # 131,072 unless told, less than many a document
    while True:
        line = text.number + 1
        found: list[str] | BadRow
        try:
            found = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = text.number
            if text.go_back():
                reader = csv.reader(text, delimiter=delimiter, strict=True)
                found = BadRow(f"malformed table in line {line}: {error}")
            else:
                found = BadRow(f"malformed table in lines {line} to {last}, which are lost: {error}")
        if error := text.take():
            found = BadRow(f"byte {error.start} of the line (0x{error.object[error.start]:02x}) is not UTF-8")
        if found:
            yield line, found


class _Lines(Iterator[str]):
    """Lines as text, which can be read again from the second one of a row on: a quote that opens by mistake runs to the
    next one, however far, and only its own line is wrong."""

    def __init__(self, file: Path):
        self._lines = lines(file)
        self._again: deque[tuple[str, UnicodeDecodeError | None]] = deque()
        self._row: list[tuple[str, UnicodeDecodeError | None]] = []
        self._returns = MOST_RETURNS
        self.number = 0
        """Of the line given last."""

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._read()
        self._row.append(line)
        self.number += 1
        return line[0]

    def _read(self) -> tuple[str, UnicodeDecodeError | None]:
        _, offset, data = next(self._lines)
        try:
            return data.decode("utf-8-sig" if offset == 0 else "utf-8") + "\n", None
        except UnicodeDecodeError as error:
            return data.decode(errors="replace") + "\n", error

    def take(self) -> UnicodeDecodeError | None:
        """Begin another row; the first line of this one that is not UTF-8, if there is one."""
        error = next((error for _, error in self._row if error), None)
        self._row = []
        return error

    def go_back(self) -> bool:
        """Give all lines of the row but its first again; False where that was done too often to go on with it."""
        if len(self._row) > 1:
            if not self._returns:
                return False
            self._returns -= 1
            self._again.extendleft(reversed(self._row[1:]))
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
    return _once(fields, "the header")


def _once(names: list[str], where: str) -> list[str]:
    """The names of columns, of which no two may be the same."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Damaged(f"{where} names column '{twice[0]}' more than once; rename one of them")
    return names


class Lost(NamedTuple):
    """Rows of a table that cannot be decoded."""

    row: int
    rows: int
    reason: str


def parquet_columns(file: Path) -> tuple[pa.Schema, int]:
    """The schema, and the number of rows. Raises Damaged."""
    with _open(file) as table:
        return table.schema_arrow, table.metadata.num_rows


def parquet_batches(
    file: Path, columns: list[str] | None, rows: int, size: int
) -> Iterator[tuple[int, pa.RecordBatch] | Lost]:
    """Batches with the number of their first row, from 0.

    Args:
        file: not compressed as a whole; Parquet compresses inside.
        columns: names to read; all when None.
        rows, size: most rows of a batch, and most bytes where rows are of about one size.

    Raises:
        Damaged: no Parquet file.
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
                yield Lost(start + done, lost, f"{reason}, {lost:,} rows lost")
            start += group.num_rows


def parquet_rows(file: Path, rows: int, size: int) -> Iterator[Row | Lost]:
    """One dict of Python values a row. Raises Damaged."""
    _once(parquet_columns(file)[0].names, "the table")
    for item in parquet_batches(file, None, rows, size):
        if isinstance(item, Lost):
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
        return BadRow(f"a text of this row is not UTF-8 (0x{error.object[error.start]:02x})")
    except (ValueError, OverflowError, pa.ArrowException):
        return {name: _value(batch.column(name)[row]) for name in batch.schema.names}


def _value(scalar: pa.Scalar) -> object:
    """A value as Python has it; as text where Python has none, as for nanoseconds of a time."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        try:
            return str(scalar.cast(pa.int64()).as_py())
        except pa.ArrowException:
            return f"({scalar.type})"


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text; some writers leave out that bytes are."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in (*text, pa.types.is_binary, pa.types.is_large_binary))


def parquet_texts(column: pa.Array) -> tuple[pa.Array, list[tuple[int, str]]]:
    """A column as valid strings, null where there is none, and (row, why) for each of those."""
    try:
        texts = column.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        texts = pa.concat_arrays([_one_text(column.slice(row, 1)) for row in range(len(column))])
    missing = np.flatnonzero(pc.is_null(texts).to_numpy(zero_copy_only=False))
    found = column.is_valid()
    return texts, [(int(row), "not UTF-8" if found[row].as_py() else "null, expected a string") for row in missing]


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
        raise Damaged(f"not a whole Parquet file ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
