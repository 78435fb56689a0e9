"""Reads sources into batches of raw documents (`file_reader`).

A source without any usable row stops the stage, because then the recipe is wrong.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from ingot.core.errors import UserError, notify
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import row_formats
from ingot.corpus.readers.file_reader import (
    BATCH_CHARACTERS,
    BATCH_DOCUMENTS,
    RAW,
    CountFields,
    FileReader,
    Piece,
    Quarantine,
    Raw,
)
from ingot.corpus.readers.locate import InputFile, locate
from ingot.corpus.readers.python_library import docs_texts
from ingot.corpus.readers.python_questions import docs_chats, docs_preferences, docs_prompts
from ingot.corpus.settings import DOCS, STDLIB, CorpusSettings, Source


def read(
    settings: CorpusSettings, quarantine: Quarantine, count_fields: CountFields = lambda uses: None
) -> Iterator[pa.Table]:
    """All documents of all sources, in order, in batches of at most 1024 documents or about 8 MB.

    Args:
        settings: the stage's settings.
        quarantine: called with every row or file that cannot be read.
        count_fields: called with the uses of the fields of every row (`FieldUses.by_name`) that becomes a document.

    Raises:
        UserError: a source is missing, empty, or without any usable row.
    """
    sources = (_read_source(source, settings, quarantine, count_fields) for source in settings.sources)
    yield from batches(itertools.chain.from_iterable(sources))


def _read_source(
    source: Source, settings: CorpusSettings, quarantine: Quarantine, count_fields: CountFields
) -> Iterator[Raw | pa.Table]:
    files = source_files(source, settings)
    account = Account(source, len(files))

    def reject(record: Quarantined) -> None:
        account.reject(record)
        quarantine(record)

    for file in files:
        for item in read_piece(Piece(file), source, settings, reject, count_fields, account.remark):
            account.usable = True
            yield item
    account.close()


def source_files(source: Source, settings: CorpusSettings) -> list[InputFile]:
    """The files of a source in reading order. Raises UserError for a source that is missing, empty or of no use."""
    files = locate(source)
    formats = {STDLIB: ("text",), DOCS: tuple(_DOCS)}.get(source.path)
    if formats is not None and settings.format not in formats:
        raise UserError(
            f'sources: {source.path} provides {" and ".join(formats)}, but format = "{settings.format}"; use a file of '
            "rows"
        )
    return files


def read_piece(
    piece: Piece,
    source: Source,
    settings: CorpusSettings,
    quarantine: Quarantine,
    count_fields: CountFields,
    remark: Callable[[str, str], None],
) -> Iterator[Raw | pa.Table]:
    """The documents of a piece of a source, one by one or as tables of `RAW`.

    Args:
        piece, source, settings: what to read, and how.
        quarantine, count_fields: as in `read`.
        remark: called with how a file was read, where it is not what its name says, and the file.
    """
    file = piece.file
    if source.path == DOCS:
        for number, (text, extra) in enumerate(_DOCS[settings.format](file.file, file.group)):
            yield Raw(text, source.path, file.path, number, file.group, extra)
        return
    reader = FileReader(piece, source, settings, quarantine, count_fields)
    yield from reader.read()
    for text in reader.remarks:
        remark(text, file.path)


class Account:
    """What becomes of a source: whether any row of it was usable, and remarks on its files."""

    def __init__(self, source: Source, files: int):
        self._source, self._files = source, files
        self._first: Quarantined | None = None
        self._remarks: dict[str, dict[str, None]] = defaultdict(dict)
        self.usable = source.path == DOCS

    def reject(self, record: Quarantined) -> None:
        self._first = self._first or record

    def remark(self, text: str, path: str) -> None:
        self._remarks[text][path] = None

    def close(self) -> None:
        """Show the remarks. Raises UserError if rows were rejected and none was usable."""
        for text, paths in self._remarks.items():
            others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            notify(f"{next(iter(paths))}{others}: {text}")
        if self._first is not None and not self.usable:
            what = "line of this file" if self._files == 1 else f"row of these {self._files} files"
            raise UserError(f"sources: {self._first.message()}; no {what} is usable: fix it or remove it from sources")


def batches(items: Iterable[Raw | pa.Table]) -> Iterator[pa.Table]:
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


_DOCS: dict[row_formats.Format, Callable[[Path, str], Iterator[tuple[str, str | None]]]] = {
    "text": docs_texts,
    "chat": docs_chats,
    "pairs": docs_preferences,
    "prompts": docs_prompts,
}
"""Format -> reader of the (document, extra fields) of a standard library module."""
