"""Reads sources into batches of raw documents. A bad row is quarantined with its position and reason.

The suffix of a file decides its type (`locate.ROWS`); `json_files` and `tables` yield its rows, and `row_formats` turns
a row into a document. A source without any usable row stops the stage, because then the recipe is wrong.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.corpus.documents import SCHEMA
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import json_files, row_formats, tables
from ingot.corpus.readers.files import BadRow, Damaged, Row, blocks
from ingot.corpus.readers.locate import ROWS, InputFile, locate
from ingot.corpus.readers.python_library import docs_chats, docs_preferences, docs_prompts, docs_texts
from ingot.corpus.readers.tables import LostRows
from ingot.corpus.settings import DOCS, STDLIB, CorpusSettings, Source

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16, which Windows editors write."""
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 8 << 20

RAW = pa.schema([SCHEMA.field(name) for name in ("text", "source", "path", "offset", "group", "extra")])


class Raw(NamedTuple):
    """A raw document: a row of `RAW`."""

    text: str
    source: str
    path: str
    offset: int
    group: str
    extra: str | None = None


Quarantine = Callable[[Quarantined], None]


def read(settings: CorpusSettings, quarantine: Quarantine) -> Iterator[pa.Table]:
    """All documents of all sources, in order, in batches of at most 1024 documents or about 8 MB.

    Args:
        settings: the stage's settings.
        quarantine: called with every row or file that cannot be read.

    Raises:
        UserError: a source is missing, empty, or without any usable row.
    """
    yield from _batches(item for source in settings.sources for item in _read_source(source, settings, quarantine))


def _batches(items: Iterable[Raw | pa.Table]) -> Iterator[pa.Table]:
    """Collect single documents into batches, across files; tables are yielded unchanged."""
    rows: list[Raw] = []
    characters = 0
    for item in items:
        if isinstance(item, pa.Table):
            if rows:
                yield _table(rows)
                rows, characters = [], 0
            yield item
            continue
        rows.append(item)
        characters += len(item.text)
        if len(rows) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield _table(rows)
            rows, characters = [], 0
    if rows:
        yield _table(rows)


def _table(rows: list[Raw]) -> pa.Table:
    return pa.table([pa.array(c, t) for c, t in zip(zip(*rows, strict=True), RAW.types, strict=True)], schema=RAW)


def _read_source(source: Source, settings: CorpusSettings, quarantine: Quarantine) -> Iterator[Raw | pa.Table]:
    files = locate(source)
    formats = {STDLIB: ("text",), DOCS: tuple(_DOCS)}.get(source.path)
    if formats is not None and settings.format not in formats:
        raise UserError(
            f'sources: {source.path} provides {" and ".join(formats)}, but format = "{settings.format}"; use a file of '
            "rows"
        )
    if source.path == DOCS:
        for file in files:
            for number, (text, extra) in enumerate(_DOCS[settings.format](file.file, file.group)):
                yield Raw(text, source.path, file.path, number, file.group, extra)
        return
    first: Quarantined | None = None
    usable = False

    def reject(record: Quarantined) -> None:
        nonlocal first
        first = first or record
        quarantine(record)

    for file in files:
        for item in _FileReader(file, source, settings, reject).read():
            usable = True
            yield item
    if first is not None and not usable:
        what = "line of this file" if len(files) == 1 else f"row of these {len(files)} files"
        raise UserError(f"sources: {first.message()}; no {what} is usable: fix it or remove it from sources")


class _FileReader:
    """Reads the documents of one file and quarantines bad rows."""

    def __init__(self, file: InputFile, source: Source, settings: CorpusSettings, quarantine: Quarantine):
        self._file, self._source, self._quarantine = file, source, quarantine
        self._format = settings.format
        field, fields = settings.names(source)
        self._field = field or ""
        self._parse = row_formats.row_parser(settings.format, field, fields)
        self._names = row_formats.identifying_fields(settings.format, field, fields)

    def read(self) -> Iterator[Raw | pa.Table]:
        """The documents of the file, one by one or as tables of `RAW`."""
        path, text = self._file.file, self._format == "text"
        try:
            kind = self._file.kind
            if kind == "json":
                kind = json_files.json_kind(path, self._names, or_text=text)
            if kind == "text":
                yield from self._text()
            elif kind == "parquet" and text:
                yield from self._parquet_texts()
            else:
                yield from self._rows(_READERS[kind](path, self._names))
        except Damaged as error:
            self._reject(str(error))

    def _text(self) -> Iterator[Raw]:
        if self._format != "text":
            self._reject(f'is plain text, but format = "{self._format}" needs rows ({" ".join(ROWS)})')
            return
        data = bytearray()
        try:
            for block in blocks(self._file.file):
                data += block
            yield self._raw(data.decode("utf-16" if data[:2] in _UTF16_MARKS else "utf-8"), 0)
        except Damaged as error:
            self._reject(str(error), offset=len(data), bytes=len(data))
        except UnicodeDecodeError as error:
            kind = "binary, not text" if b"\0" in data[:8192] else "not UTF-8"
            reason = f"byte {error.start} (0x{data[error.start]:02x}) is {kind}; save the file as UTF-8"
            line = data.count(b"\n", 0, error.start) + 1
            self._reject(reason, line=line, offset=error.start, bytes=len(data))

    def _rows(self, rows: Iterator[Row | LostRows]) -> Iterator[Raw]:
        readable, last = 0, Row(None, 0)
        try:
            for row in rows:
                if isinstance(row, LostRows):
                    self._reject_lost(row)
                    continue
                last = row
                try:
                    if isinstance(row.value, BadRow):
                        raise row.value
                    document = self._parse(row.value)
                except BadRow as error:
                    self._reject_row(row, str(error))
                    continue
                readable += 1
                yield self._raw(document.text, row.offset, document.extra)
        except Damaged as error:
            position = {"line": last.line + 1} if last.line else {"row": last.row + 1} if last.row else {}
            reason = f"{error}, after {readable:,} readable rows"
            self._reject(reason, offset=last.offset + (last.bytes or 1), **position)

    def _parquet_texts(self) -> Iterator[pa.Table]:
        """The text column as Arrow tables, without a conversion to Python values."""
        path, field = self._file.file, self._field
        schema, rows = tables.parquet_columns(path)
        if field not in schema.names:
            self._reject(row_formats.missing_field(field, schema.names), documents=rows)
            return
        if schema.names.count(field) > 1:
            self._reject(f"column '{field}' occurs more than once; keep one", documents=rows)
            return
        if not tables.is_text(schema.field(field).type):
            self._reject(f"column '{field}' is {schema.field(field).type}, expected a string", documents=rows)
            return
        for item in tables.parquet_batches(path, [field], BATCH_DOCUMENTS, BATCH_CHARACTERS):
            if isinstance(item, LostRows):
                self._reject_lost(item)
                continue
            start, batch = item
            texts, bad = tables.parquet_texts(batch.column(field))
            for row, reason in bad:
                self._reject(f"column '{field}' is {reason}", row=start + row + 1, offset=start + row)
            if valid := len(texts) - len(bad):
                offsets = np.arange(start, start + len(texts))[texts.is_valid().to_numpy(zero_copy_only=False)]
                names = (self._source.path, self._file.path, self._file.group)
                source, name, group = (pa.repeat(n, valid) for n in names)
                columns = [texts.drop_null(), source, name, pa.array(offsets), group, pa.nulls(valid, pa.string())]
                yield pa.table(columns, schema=RAW)

    def _raw(self, text: str, offset: int, extra: str | None = None) -> Raw:
        return Raw(text, self._source.path, self._file.path, offset, self._file.group, extra)

    def _reject_row(self, row: Row, reason: str) -> None:
        size = row.bytes
        if size is None:  # the size of a table row is that of its JSON
            size = 0 if isinstance(row.value, BadRow) else len(json.dumps(row.value, default=str).encode())
        self._reject(reason, line=row.line, row=row.row, offset=row.offset, bytes=size)

    def _reject_lost(self, lost: LostRows) -> None:
        self._reject(lost.reason, row=lost.row + 1, offset=lost.row, documents=lost.rows)

    def _reject(self, reason: str, *, line: int = 0, offset: int = 0, bytes: int = 0, **fields: int) -> None:
        self._quarantine(Quarantined(self._source.path, self._file.path, line, offset, bytes, reason, **fields))


_DOCS: dict[row_formats.Format, Callable[[Path, str], Iterator[tuple[str, str | None]]]] = {
    "text": docs_texts,
    "chat": docs_chats,
    "pairs": docs_preferences,
    "prompts": docs_prompts,
}
"""Format -> reader of the (document, extra fields) of a standard library module."""
_READERS: dict[str, Callable[[Path, Container[str]], Iterator[Row | LostRows]]] = {
    "jsonl": lambda file, names: json_files.jsonl_rows(file),
    "json": json_files.json_rows,
    "csv": lambda file, names: tables.csv_rows(file, ","),
    "tsv": lambda file, names: tables.csv_rows(file, "\t"),
    "parquet": lambda file, names: tables.parquet_rows(file, BATCH_DOCUMENTS, BATCH_CHARACTERS),
}
"""File type -> reader of rows; `names` are the identifying fields of a row."""
