"""Streams a file's bytes (decompressed) and lines, and defines the `Row` that every reader yields.

Ingot reads lines itself so that a malformed line is reported with its position and the rest of the file is read. The
readers of Daft, Polars and pyarrow stop at such a line without naming it; datatrove loses the complete file.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError

BLOCK = 1 << 20


class Damaged(Exception):
    """The file is unreadable from some position on. The rows yielded before are valid."""


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


def lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from 1, byte offset in the decompressed file, line without its newline)."""
    number, offset, pieces = 0, 0, []
    for block in blocks(file):
        first, *others = block.split(b"\n")
        pieces.append(first)  # a list, because joining at every block is quadratic in the length of a line
        if not others:
            continue
        *complete, rest = [b"".join(pieces), *others]
        pieces = [rest]
        for line in complete:
            number += 1
            yield number, offset, line
            offset += len(line) + 1
    if last := b"".join(pieces):
        yield number + 1, offset, last


def blocks(file: Path) -> Iterator[bytes]:
    """Yield the decompressed content; the suffix decides about compression. Raises Damaged for a corrupt file."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".gz":
            yield from _gunzip(file)
        elif suffix == ".zst":
            from pyarrow import CompressedInputStream, OSFile  # imported late: reading a recipe imports this module

            with OSFile(str(file)) as packed, CompressedInputStream(packed, "zstd") as stream:
                while block := stream.read(BLOCK):
                    yield block
        else:
            with file.open("rb") as plain:
                while block := plain.read(BLOCK):
                    yield block
    except zlib.error as error:
        raise Damaged(f"corrupt gzip data ({error})") from None
    except (PermissionError, FileNotFoundError) as error:
        raise unreadable(file, error) from None
    except OSError as error:
        if suffix != ".zst":
            raise
        raise Damaged(f"corrupt or truncated zstd data ({error})") from None


def unreadable(file: Path, error: OSError) -> UserError:
    """The UserError for a file that cannot be opened."""
    return UserError(f"sources: {file} cannot be read ({error.strerror}); check its permissions")


def _gunzip(file: Path) -> Iterator[bytes]:
    """Decompress gzip up to the point of truncation; the gzip module loses the last block of a truncated file."""
    state = zlib.decompressobj(wbits=31)
    with file.open("rb") as packed:
        while data := packed.read(BLOCK // 4):
            while data:
                if state.eof:  # a file may have several gzip members; zero bytes after the last one are padding
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    state = zlib.decompressobj(wbits=31)
                yield from _inflate(state, data)
                data = state.unused_data
    if not state.eof:
        raise Damaged("truncated gzip data")


def _inflate(state: Any, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed data in blocks, because repetitive text can expand a thousandfold."""
    while block := state.decompress(data, BLOCK):
        yield block
        data = state.unconsumed_tail
