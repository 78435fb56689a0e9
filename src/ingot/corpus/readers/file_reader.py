"""Reads the documents of one file, or of a range of one; a bad row is quarantined with its position and reason.

The content of a file decides its type, then its suffix (`content`, `suffixes`); `json_files` and `tables` yield its
rows, `row_formats` turns a row into a document, and `web` reads pages.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ingot.corpus.documents import SCHEMA
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import json_files, row_formats, tables, web
from ingot.corpus.readers.content import Kind, content_kind, identify, not_text
from ingot.corpus.readers.fields import MEANINGS, meaning, quoted
from ingot.corpus.readers.files import UTF8, BadRow, Row, TextFile, not_utf8, row_too_long
from ingot.corpus.readers.locate import InputFile
from ingot.corpus.readers.packing import Damaged, unpacked
from ingot.corpus.readers.suffixes import ROWS
from ingot.corpus.readers.tables import LostRows
from ingot.corpus.settings import CorpusSettings, Source

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 8 << 20
MAX_OTHERS = 5
"""Members of a JSON object beside its rows that a remark names."""
_OF_EVERY_ROW = frozenset({"system", "prompt", "input", "tools"})
"""Meanings of such members that say something about each row."""

RAW = pa.schema([SCHEMA.field(name) for name in ("text", "source", "path", "offset", "group", "extra")])


class Raw(NamedTuple):
    """A raw document: a row of `RAW`."""

    text: str
    source: str
    path: str
    offset: int
    group: str
    extra: str | None = None


class Piece(NamedTuple):
    """A file to read, or a range of one: of lines (unpacked bytes) or of a Parquet file (row groups)."""

    file: InputFile
    start: int = 0
    end: int | None = None
    """After the range; a line belongs to the range in which it begins."""


Quarantine = Callable[[Quarantined], None]
CountFields = Callable[[Mapping[str, str]], None]


class FileReader:
    """Reads the documents of one piece and quarantines bad rows. The lines of a range are counted from its start."""

    def __init__(
        self,
        piece: Piece,
        source: Source,
        settings: CorpusSettings,
        quarantine: Quarantine,
        count_fields: CountFields,
    ):
        self._piece, self._file, self._source = piece, piece.file, source
        self._quarantine, self._count_fields = quarantine, count_fields
        self._format, self._metadata = settings.format, frozenset(settings.metadata)
        self.remarks: list[str] = []
        """How the file was read, where it is not what its name says."""
        self._max_bytes = settings.max_bytes
        self._html: web.Html = settings.html
        self._too_long = row_too_long(settings.max_bytes)
        field, fields = settings.names(source)
        self._field = field or ""
        self._parse = row_formats.row_parser(settings.format, field, fields, self._metadata)
        self._names = row_formats.identifying_fields(settings.format, field, fields)

    def read(self) -> Iterator[Raw | pa.Table]:
        """The documents of the file, one by one or as tables of `RAW`."""
        path, text = self._file.file, self._format == "text"
        try:
            file, head = identify(path, self._source.encoding, self._max_bytes)
        except Damaged as error:
            self._reject(str(error), bytes=path.stat().st_size)
            return
        try:
            kind = self._source.kind or content_kind(head, self._file.kind, self._file.is_source)
            self._remark(file, kind)
            if kind == "text":
                yield from self._text(file)
            elif kind == "parquet":
                if file.packing:
                    raise Damaged(f"is a Parquet file packed with {file.packing}; unpack it")
                yield from self._parquet_texts() if text else self._rows(self._parquet_rows())
            elif kind == "json":
                yield from self._json(file)
            elif kind in ("html", "warc"):
                yield from self._pages(file, kind)
            else:
                lines = dataclasses.replace(file, start=self._piece.start, end=self._piece.end)
                yield from self._rows(_READERS[kind](lines))
        except Damaged as error:
            self._reject(str(error))

    def _remark(self, file: TextFile, kind: Kind) -> None:
        if file.packing in ("bzip2", "xz", "lzma"):
            self.remarks.append(f"packed with {file.packing}, which unpacks slowly; gzip and zstd are faster")
        if file.encoding != UTF8:
            self.remarks.append(f"read as {file.encoding}")
        if kind == "text" and self._file.file.name.lower().endswith(".xml") and not self._source.kind:
            self.remarks.append('XML, read as text with its tags; kind = "text" of the source says that it is meant')
        if kind != self._file.kind and not self._source.kind:
            self.remarks.append(f"read as {kind}, which it looks like; set `kind` of the source to read it otherwise")

    def _pages(self, file: TextFile, kind: Kind) -> Iterator[Raw]:
        """The page of an HTML file, or those of an archive."""
        if self._format != "text":
            self._reject(f'holds pages of the web, but format = "{self._format}" needs rows ({" ".join(ROWS)})')
            return
        skipped: Counter[str] = Counter()
        guessed: Counter[str] = Counter()
        if kind == "html":
            data = b"".join(unpacked(file.path, file.packing))
            if len(data) > self._max_bytes:
                self._reject(f"the page has {len(data):,} bytes, more than max_document_mb", bytes=len(data))
                return
            encoding = None if file.encoding == UTF8 and not self._source.encoding else file.encoding
            found = iter([web.Record(web.page_of(data, self._html, encoding), 0)])
        else:
            found = web.records(file.path, file.packing, self._html, self._max_bytes, skipped)
        for page, offset in found:
            problem = page.reason if isinstance(page, web.LostPage) else self._problem(page.text)
            if problem:
                size = page.bytes if isinstance(page, web.LostPage) else len(page.text.encode())
                self._reject(problem, offset=offset, bytes=size)
                continue
            assert isinstance(page, web.Page)
            if page.guessed:
                guessed[page.guessed] += 1
            self._count_fields(dict.fromkeys(page.metadata, "metadata"))
            yield self._raw(page.text, offset, web.metadata_json(page))
        for name, pages in guessed.most_common():
            which = f"encoding of {pages:,} page{'s' if pages > 1 else ''}: {name}"
            self.remarks.append(f"{which}, guessed, because none that fits is declared")
        if skipped:
            self.remarks.append("not read: " + ", ".join(f"{n:,} {reason}" for reason, n in skipped.most_common()))

    def _json(self, file: TextFile) -> Iterator[Raw]:
        text = self._format == "text"
        try:
            layout = json_files.scan(file, self._names)
        except Damaged as error:
            self._reject(f'{error}; kind = "text" of the source reads it as it is' if text else str(error))
            return
        if layout.kind == "configuration":
            if not text:
                self._reject("a JSON object without rows, expected an array, or one list of objects")
                return
            self.remarks.append("a JSON object without rows, read as one text")
            yield from self._text(file)
            return
        others = {name: has_text for name, has_text in layout.others.items() if name not in self._metadata}
        lost = None if text else next((n for n, t in others.items() if t and meaning(n) in _OF_EVERY_ROW), None)
        if lost is not None:
            what = MEANINGS[str(meaning(lost))].what
            self._reject(
                f"member {quoted(lost)} beside the rows of {quoted(layout.field)} is {what}, which would be lost here; "
                "write it into the rows, or list it in `metadata` to leave it out"
            )
            return
        if others:
            named = ", ".join(map(quoted, [*others][:MAX_OTHERS])) + (", ..." if len(others) > MAX_OTHERS else "")
            self.remarks.append(f"only the rows of {quoted(layout.field)} are read, not {named} beside them")
        yield from self._rows(json_files.json_rows(file, layout))

    def _text(self, file: TextFile) -> Iterator[Raw]:
        """The complete file as one document, or cut at ends of lines into documents of at most `max_bytes`."""
        if self._format != "text":
            self._reject(f'is plain text, but format = "{self._format}" needs rows ({" ".join(ROWS)})')
            return
        data, offset, line, pieces = bytearray(), 0, 1, 0
        try:
            for block in file.blocks():
                data += block
                while len(data) > file.max_bytes:
                    end = _cut(data, file.max_bytes)
                    yield from self._document(bytes(data[:end]), offset, line)
                    line += data.count(b"\n", 0, end)
                    offset, pieces = offset + end, pieces + 1
                    del data[:end]
        except Damaged as error:
            self._reject(str(error), offset=offset + len(data), bytes=len(data))
            return
        if data or not pieces:
            yield from self._document(bytes(data), offset, line)
        if pieces:
            self.remarks.append(f"longer than max_document_mb, cut at line ends into {pieces + 1:,} documents")

    def _document(self, data: bytes, offset: int, line: int) -> Iterator[Raw]:
        """The document, or none if the bytes at `offset` of the file, in its line `line`, are no text."""
        if reason := not_text(data):
            self._reject(reason, offset=offset, bytes=len(data))
            return
        try:
            yield self._raw(data.decode(), offset)
        except UnicodeDecodeError as error:
            place, line = offset + error.start, line + data.count(b"\n", 0, error.start)
            self._reject(not_utf8(f"byte {place}", error), line=line, offset=place, bytes=len(data))

    def _rows(self, rows: Iterator[Row | LostRows]) -> Iterator[Raw]:
        start = self._piece.start
        readable, last = 0, Row(None, start)
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
                    if problem := self._problem(document.text):
                        raise BadRow(problem)
                except BadRow as error:
                    self._reject_row(row, str(error))
                    continue
                readable += 1
                self._count_fields(document.uses)
                yield self._raw(document.text, row.offset, document.extra)
        except Damaged as error:
            position = {"row": last.row + 1} if last.row else {"line": last.line + 1} if last.line or start else {}
            reason = f"{error}, after {readable:,} readable rows" + (" of its last part" if start else "")
            self._reject(reason, offset=last.offset + (last.bytes or 1), **position)

    @property
    def _groups(self) -> slice:
        return slice(self._piece.start, self._piece.end)

    def _parquet_rows(self) -> Iterator[Row | LostRows]:
        return tables.parquet_rows(self._file.file, BATCH_DOCUMENTS, BATCH_CHARACTERS, self._groups)

    def _parquet_texts(self) -> Iterator[pa.Table]:
        """The documents as Arrow tables; only the other columns are converted to Python values."""
        path, field = self._file.file, self._field
        schema, rows = tables.parquet_columns(path)
        if field not in schema.names:
            self._reject(row_formats.missing_field(field, schema.names), documents=rows)
            return
        if not tables.is_text(schema.field(field).type):
            self._reject(f"column '{field}' is {schema.field(field).type}, expected a string", documents=rows)
            return
        for item in tables.parquet_batches(path, BATCH_DOCUMENTS, BATCH_CHARACTERS, self._groups):
            if isinstance(item, LostRows):
                self._reject_lost(item)
                continue
            start, batch = item
            texts, bad = tables.parquet_texts(batch.column(field))
            extras, lost = self._extras(batch, texts)
            reasons = {row: f"column '{field}' is {reason}" for row, reason in bad} | lost
            problems = ((row, self._problem(text)) for row, text in tables.suspects(texts, self._max_bytes))
            reasons |= {row: problem for row, problem in problems if problem}
            for row, reason in sorted(reasons.items()):
                self._reject(reason, row=start + row + 1, offset=start + row)
            if valid := len(texts) - len(reasons):
                kept = np.array([row for row in range(len(texts)) if row not in reasons])
                names = (self._source.path, self._file.path, self._file.group)
                source, name, group = (pa.repeat(n, valid) for n in names)
                columns = [texts.take(kept), source, name, pa.array(start + kept), group, extras.take(kept)]
                yield pa.table(columns, schema=RAW)

    def _extras(self, batch: pa.RecordBatch, texts: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The other columns of each row as JSON, and row -> reason of the rows whose fields would be lost."""
        if batch.num_columns == 1:
            for _ in range(len(texts) - texts.null_count):
                self._count_fields({self._field: "document"})
            return pa.nulls(len(texts), pa.string()), {}
        extras: list[str | None] = []
        lost: dict[int, str] = {}
        others = tables.python_rows(batch.drop_columns([self._field]))
        for number, (row, text) in enumerate(zip(others, texts, strict=True)):
            extra = None
            try:
                if isinstance(row, BadRow):
                    raise row
                if text.is_valid:
                    uses = row_formats.text_fields(row, self._field, text.as_py(), self._metadata)
                    extra = uses.extra()
                    self._count_fields(uses.by_name)
            except BadRow as error:
                lost[number] = str(error)
            extras.append(extra)
        return pa.array(extras, pa.string()), lost

    def _raw(self, text: str, offset: int, extra: str | None = None) -> Raw:
        return Raw(text, self._source.path, self._file.path, offset, self._file.group, extra)

    def _problem(self, text: str) -> str | None:
        """The reason to reject the document of a row that was read, or None."""
        data = text.encode()
        return self._too_long if len(data) > self._max_bytes else not_text(data)

    def _reject_row(self, row: Row, reason: str) -> None:
        size = row.bytes
        if size is None:  # the size of a table row is that of its JSON
            try:
                size = 0 if isinstance(row.value, BadRow) else len(json.dumps(row.value, default=str).encode())
            except RecursionError:  # nested deeper than Python's limit
                size = 0
        self._reject(reason, line=row.line, row=row.row, offset=row.offset, bytes=size)

    def _reject_lost(self, lost: LostRows) -> None:
        self._reject(lost.reason, row=lost.row + 1, offset=lost.row, documents=lost.rows)

    def _reject(self, reason: str, *, line: int = 0, offset: int = 0, bytes: int = 0, **fields: int) -> None:
        self._quarantine(Quarantined(self._source.path, self._file.path, line, offset, bytes, reason, **fields))


_READERS: dict[str, Callable[[TextFile], Iterator[Row]]] = {
    "jsonl": json_files.jsonl_rows,
    "csv": lambda file: tables.csv_rows(file, tabs=False),
    "tsv": lambda file: tables.csv_rows(file, tabs=True),
}
"""File type -> reader of rows."""


def _cut(data: bytearray, limit: int) -> int:
    """Where to cut text of more than `limit` bytes: after an empty line, a line, a blank, or a character."""
    for separator in (b"\n\n", b"\n", b" "):
        if (end := data.rfind(separator, limit // 2, limit)) >= 0:
            return end + len(separator)
    end = limit
    while end > 1 and data[end] & 0xC0 == 0x80:  # a byte within a character
        end -= 1
    return end
