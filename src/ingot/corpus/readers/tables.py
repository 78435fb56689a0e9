"""Reads rows from tables: CSV and TSV with a header, and Parquet.

CSV is parsed by Python's `csv` module in strict mode: the readers of pyarrow and Polars stop at the first bad byte,
limit a row to a block, and do not report line numbers. Parquet is read by row group through small buffers, so that
memory does not depend on the file's size; an undecodable row group loses only its own rows, which are counted.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import codecs
import contextlib
import csv
import re
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingot.core.errors import shortened
from ingot.corpus.readers.files import BadRow, Line, Row, TextFile, not_utf8, row_too_long, unreadable
from ingot.corpus.readers.packing import Damaged

MAX_REWINDS = 1000
"""Maximum number of rewinds per file after rows with a stray quote."""
SAMPLE_BYTES = 1 << 20
"""Size of the lines from which quoting in a TSV is told."""


_Record = tuple[int, list[str] | BadRow, int]
"""Number of the first line of a row, its fields, its bytes."""


def csv_rows(file: TextFile, tabs: bool) -> Iterator[Row]:
    """One dict of strings per row, keys from the header. Raises Damaged.

    Args:
        file: the file.
        tabs: read TSV, where a quotation mark is a character like any other, unless `_is_quoted` says otherwise.
            Otherwise CSV with commas, or semicolons if the header has no comma; quoted cells may contain line ends.
    """
    first_line = next(file.lines(), None)
    header = first_line.data.removeprefix(codecs.BOM_UTF8) if first_line else b""
    hint = _HINT.fullmatch(header)
    semicolons = b";" in header and b"," not in header
    delimiter = hint[1].decode("latin-1") if hint else "\t" if tabs else ";" if semicolons else ","
    unquoted = delimiter == "\t" and not _is_quoted(file)
    records = _tab_records(file) if unquoted else _records(file, delimiter)
    if hint:
        next(records)
    if (first := next(records, None)) is None:
        return
    header = _header(first[1])
    for number, (line, fields, size) in enumerate(records):
        value = fields if isinstance(fields, BadRow) else _named(header, fields)
        yield Row(value, number, line, bytes=size)


_HINT = re.compile(rb'"?sep=([,;|\t])"?\r?')
"""The first line with which Excel is told the separator."""
_DOUBLED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
"""A quoted cell with a quotation mark in it."""


def _is_quoted(file: TextFile) -> bool:
    """Whether the cells of a TSV are quoted: all of the header, or those that need it, as pandas and Excel write them.

    The latter is so if the first lines are rows of equal length with quoting, and either are not without it, or have
    cells in which quotation marks are doubled.
    """
    lines, size = list[str](), 0
    with contextlib.suppress(Damaged):  # the reader comes to the same place
        for line in file.lines():
            lines.append(_decode(line)[0].strip("\r") + "\n")
            size += line.size
            if size > SAMPLE_BYTES or line.too_long:
                break
    rows = [line[:-1].split("\t") for line in lines if line != "\n"]
    if not rows or all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in rows[0]):
        return bool(rows)
    width = len(rows[0])
    if all(len(row) == width for row in rows) and not any(_DOUBLED.fullmatch(c) for row in rows for c in row):
        return False
    try:
        return all(len(row) in (0, width) for row in csv.reader(lines, delimiter="\t", strict=True))
    except csv.Error as error:
        return size > SAMPLE_BYTES and "unexpected end" in str(error)  # the last row of the sample is cut


def _tab_records(file: TextFile) -> Iterator[_Record]:
    """As `_records`, without quoting: a line is a row and a tab separates its fields."""
    for line in file.lines():
        if line.too_long:
            yield line.number, BadRow(row_too_long(file.max_bytes, line.size)), line.size
        elif line.data.strip(b"\r"):
            text, error = _decode(line)
            yield line.number, _not_utf8(error) if error else text.removesuffix("\r").split("\t"), line.size


def _records(file: TextFile, delimiter: str) -> Iterator[_Record]:
    """All rows, the header first; a quoted field may contain line ends."""
    text = _Lines(file)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    csv.field_size_limit(file.max_bytes)  # the default of 131,072 is too small for documents
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
        error, size = text.end_row()
        if error:
            record = _not_utf8(error)
        if record:
            yield line, record, size


def _decode(line: Line) -> tuple[str, UnicodeDecodeError | None]:
    """The text of a line, and the error if it is not UTF-8."""
    try:
        return line.data.removeprefix(codecs.BOM_UTF8).decode(), None
    except UnicodeDecodeError as error:
        return line.data.decode(errors="replace"), error


def _not_utf8(error: UnicodeDecodeError) -> BadRow:
    return BadRow(not_utf8(f"byte {error.start} of the line", error))


class _Line(NamedTuple):
    """A line of a table: text with its line end, the error if it is not UTF-8, bytes without the line end."""

    text: str
    error: UnicodeDecodeError | None
    size: int


class _Lines(Iterator[str]):
    """Decoded lines that can be rewound to the second line of the current row.

    A stray quote extends its row to the next quote, however far away; after a rewind only the quote's line is lost.
    """

    def __init__(self, file: TextFile):
        self._file, self._lines = file, file.lines()
        self._pending: deque[_Line] = deque()
        self._row: list[_Line] = []
        self._size = 0
        self._rewinds_left = MAX_REWINDS
        self.number = 0
        """Number of the last line read, from 1."""

    def __next__(self) -> str:
        line = self._pending.popleft() if self._pending else self._read()
        self._row.append(line)
        self._size += line.size
        self.number += 1
        if self._size > self._file.max_bytes:
            raise csv.Error(row_too_long(self._file.max_bytes))
        return line.text

    def _read(self) -> _Line:
        line = next(self._lines)
        text, error = _decode(line)
        return _Line(text + "\n", error, line.size)

    def end_row(self) -> tuple[UnicodeDecodeError | None, int]:
        """End the current row. Returns the error of its first line that is not UTF-8, or None, and its bytes."""
        error = next((line.error for line in self._row if line.error), None)
        size = sum(line.size + 1 for line in self._row) - 1
        self._row, self._size = [], 0
        return error, size

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
        return BadRow(f"found {len(fields)} fields, expected {len(header)} ({shortened(', '.join(header))})")
    return dict(zip(header, fields, strict=True))


def _header(fields: list[str] | BadRow) -> list[str]:
    if isinstance(fields, BadRow):
        raise Damaged(f"the header cannot be read: {fields}; expected a line of column names")
    names = [name if name.strip() else f"column {number}" for number, name in enumerate(fields, 1)]
    return _check_unique(names, "the header")


def _check_unique(names: list[str], where: str) -> list[str]:
    """The column names unchanged. Raises Damaged if two are equal."""
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise Damaged(f"{where} names column '{shortened(min(repeated))}' more than once; rename one of them")
    return names


class LostRows(NamedTuple):
    """A range of table rows that cannot be decoded."""

    row: int
    """Number of the first row, from 0."""
    rows: int
    reason: str


def parquet_columns(file: Path) -> tuple[pa.Schema, int]:
    """The schema and the number of rows. Raises Damaged, also for two columns of one name."""
    with _open(file) as table:
        _check_unique(table.schema_arrow.names, "the table")
        return table.schema_arrow, table.metadata.num_rows


def parquet_batches(
    file: Path, rows: int, size: int, groups: slice = slice(None)
) -> Iterator[tuple[int, pa.RecordBatch] | LostRows]:
    """Yield (number of the first row from 0, batch).

    Args:
        file: a Parquet file without an outer compression.
        rows: maximum number of rows per batch.
        size: approximate maximum number of bytes per batch.
        groups: the row groups to read.

    Raises:
        Damaged: not a Parquet file.
    """
    with _open(file) as table:
        sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
        for number in range(table.num_row_groups)[groups]:
            start, group = sum(sizes[:number]), table.metadata.row_group(number)
            batch_rows = max(1, min(rows, size * group.num_rows // max(group.total_byte_size, 1)))
            done = 0
            try:
                for batch in table.iter_batches(batch_rows, [number], use_threads=False):
                    yield start + done, batch
                    done += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                lost = group.num_rows - done
                reason = f"row group {number} cannot be decoded from row {start + done + 1} on ({_first_line(error)})"
                yield LostRows(start + done, lost, f"{reason}, {lost:,} rows lost")


def parquet_rows(file: Path, rows: int, size: int, groups: slice = slice(None)) -> Iterator[Row | LostRows]:
    """One dict of Python values per row. Raises Damaged."""
    parquet_columns(file)
    for item in parquet_batches(file, rows, size, groups):
        if isinstance(item, LostRows):
            yield item
            continue
        start, batch = item
        for number, value in enumerate(python_rows(batch), start):
            yield Row(value, number, row=number + 1)


def python_rows(batch: pa.RecordBatch) -> list[Any]:
    """A dict of Python values for each row; a `BadRow` for one that is not UTF-8."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_one_row(batch, row) for row in range(batch.num_rows)]


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


def suspects(texts: pa.Array, size: int) -> Iterator[tuple[int, str]]:
    """(row, text) of the texts with more than `size` bytes or with control characters."""
    found = pc.or_(pc.greater(pc.binary_length(texts), size), pc.match_substring_regex(texts, _CONTROLS))
    for row in np.flatnonzero(pc.fill_null(found, False)).tolist():
        yield row, texts[row].as_py()


_CONTROLS = r"[\x00-\x08\x0e-\x1f\x7f-\x{84}\x{86}-\x{9f}]"


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
