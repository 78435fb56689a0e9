"""A file's bytes, decompressed as they are read, and its lines; and the row, which is what every reader makes of them.

Own line reading, because no engine's survives real data (measured: one malformed line ends Daft, Polars and pyarrow
without naming it; datatrove loses the whole file on one bad byte).
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError

BLOCK = 1 << 20


class Damaged(Exception):
    """A file that stops being readable, and why; the rows that came before are good."""


class BadRow(Exception):
    """Why a row is no document."""


class Row(NamedTuple):
    """One row of a file, and where it is."""

    value: Any
    """What was parsed; a `BadRow` where that failed."""
    offset: int
    """What its document gets as `offset`: the byte of a line, or the number of the row from 0."""
    line: int = 0
    """From 1; 0 where rows have no lines."""
    row: int = 0
    """From 1; 0 where the line says where it is."""
    bytes: int | None = None
    """Its length in the file, where the reader knows it."""


def lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset in the decompressed file, line without its newline)."""
    number, offset, carried = 0, 0, []
    for block in blocks(file):
        first, *others = block.split(b"\n")
        carried.append(first)  # a list, because joining at every block is quadratic in the length of a line
        if not others:
            continue
        *whole, rest = [b"".join(carried), *others]
        carried = [rest]
        for line in whole:
            number += 1
            yield number, offset, line
            offset += len(line) + 1
    if last := b"".join(carried):
        yield number + 1, offset, last


def blocks(file: Path) -> Iterator[bytes]:
    """Decompressed content, by the file's suffix. Raises Damaged where it ends early or is corrupt."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".gz":
            yield from _gunzip(file)
        elif suffix == ".zst":
            from pyarrow import CompressedInputStream, OSFile  # whoever reads a recipe imports this file

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
    """The sentence for a file that may not be opened."""
    return UserError(f"sources: {file} cannot be read ({error.strerror}); check its permissions")


def _gunzip(file: Path) -> Iterator[bytes]:
    """Like the gzip module, which returns nothing of the last block of a truncated file."""
    state = zlib.decompressobj(wbits=31)
    with file.open("rb") as packed:
        while data := packed.read(BLOCK // 4):
            while data:
                if state.eof:  # a file may be several gzip members; zero bytes after the last are padding
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    state = zlib.decompressobj(wbits=31)
                yield from _inflate(state, data)
                data = state.unused_data
    if not state.eof:
        raise Damaged("truncated gzip data")


def _inflate(state: Any, data: bytes) -> Iterator[bytes]:
    """What the data hold, in blocks: repetitive text is a thousand times its packed size."""
    while block := state.decompress(data, BLOCK):
        yield block
        data = state.unconsumed_tail
