"""A file of text as its readers see it: unpacked, as UTF-8, in blocks or lines; and the `Row` that every reader yields.

Ingot reads lines itself so that a malformed line is reported with its position and the rest of the file is read. The
readers of Daft, Polars and pyarrow stop at such a line without naming it; datatrove loses the complete file.
"""

import codecs
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError
from ingot.corpus.readers.packing import Damaged, unpacked

UTF8 = "utf-8"


class BadRow(Exception):
    """The row is not a valid document."""


class Row(NamedTuple):
    """A row of a file and its position."""

    value: Any
    """The parsed value; a `BadRow` if parsing failed."""
    offset: int
    """The `offset` of the document: the byte of the line, or the row number from 0."""
    line: int = 0
    """From 1; 0 for formats without lines."""
    row: int = 0
    """From 1; 0 if `line` is given."""
    bytes: int | None = None
    """Size in the file, if the reader knows it."""


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """From 1."""
    offset: int
    """Byte in the unpacked content."""
    size: int
    """Bytes, without the newline."""
    data: bytes
    """Without the newline; of a line that is `too_long` its beginning."""

    @property
    def too_long(self) -> bool:
        """Whether the line is longer than `TextFile.max_bytes`, so that it was not kept in memory."""
        return self.size > len(self.data)


@dataclass(frozen=True)
class TextFile:
    """A file of text: where it is, and how it is read."""

    path: Path
    packing: str | None = None
    """As `packing.packing_of`."""
    encoding: str = UTF8
    """A Python codec."""
    max_bytes: int = 16_000_000
    """Maximum size of a row, which bounds the memory of every reader."""
    newline: bytes = b"\n"
    """What ends a line; `\\r` in files of old Macintosh programs."""
    start: int = 0
    end: int | None = None
    """The range of unpacked bytes in which the lines to read begin; of UTF-8 only. Lines are counted from its start."""

    def blocks(self) -> Iterator[bytes]:
        """The unpacked content as UTF-8; what claims to be UTF-8 is not checked. Raises Damaged and UserError."""
        try:
            content = unpacked(self.path, self.packing)
            yield from content if self.encoding == UTF8 else self._transcoded(content)
        except (PermissionError, FileNotFoundError) as error:
            raise unreadable(self.path, error) from None

    def _transcoded(self, content: Iterator[bytes]) -> Iterator[bytes]:
        decoder = codecs.getincrementaldecoder(self.encoding)()
        position = 0
        for block in itertools.chain(content, [b""]):
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block).encode()
            except UnicodeError as error:
                start = position - pending + getattr(error, "start", 0)
                raise Damaged(f"byte {start:,} is not {self.encoding}; correct the encoding of the source") from None
            position += len(block)

    def lines(self) -> Iterator[Line]:
        """All lines. Raises Damaged, after the last complete line."""
        blocks, offset = self._after_line() if self.start else (self.blocks(), 0)
        end = math.inf if self.end is None else self.end
        number, size = 1, 0
        pieces: list[bytes] = []  # joining at every block would be quadratic in the length of a line
        if offset >= end:
            return
        for block in blocks:
            first, *others = block.split(self.newline)
            if size <= self.max_bytes:
                pieces.append(first)
            size += len(first)
            for following in others:
                yield Line(number, offset, size, self._joined(pieces, size))
                number, offset = number + 1, offset + size + 1
                if offset >= end:
                    return
                pieces, size = [following], len(following)
        if size:
            yield Line(number, offset, size, self._joined(pieces, size))

    def _after_line(self) -> tuple[Iterator[bytes], int]:
        """What follows the line that begins before `start`, and where; an earlier range names damage within it."""
        position = self.start - 1
        blocks = unpacked(self.path, self.packing, position)
        try:
            for block in blocks:
                if (end := block.find(self.newline)) >= 0:
                    return itertools.chain([block[end + 1 :]], blocks), position + end + 1
                position += len(block)
        except Damaged:
            pass
        return iter(()), position

    def _joined(self, pieces: list[bytes], size: int) -> bytes:
        return b"".join(pieces)[: size if size <= self.max_bytes else 80]


def row_too_long(max_bytes: int, size: int | None = None) -> str:
    """The reason to reject a row of more than `max_bytes`."""
    what = f"{size:,} bytes" if size else "its row"
    return (
        f"{what} is longer than the {max_bytes / 1e6:g} MB of max_document_mb; check for a missing line end or quote, "
        "or raise it"
    )


def not_utf8(place: str, error: UnicodeDecodeError) -> str:
    """The reason to reject text that is not UTF-8, with the place of its first bad byte."""
    byte = error.object[error.start]
    return (
        f'{place} (0x{byte:02x}) is not UTF-8; set the encoding of the source, such as "cp1252", or save the file as '
        "UTF-8"
    )


def unreadable(file: Path, error: OSError) -> UserError:
    """The UserError for a file that cannot be opened."""
    return UserError(f"sources: {file} cannot be read ({error.strerror}); check its permissions")
