"""Unpacks compressed files. The first bytes tell how a file is packed; its name is not asked.

Every decoder is driven the same way: it gives out all that was decoded before the data ends early or turns out to be
corrupt, so that the complete rows of a truncated file are read.
"""

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 1 << 16
"""Maximum number of bytes that a decoder gives out at once: an error costs what was decoded in the same call."""
HEAD_BYTES = 32
"""Number of bytes from which `packing_of` decides."""
MAX_LZMA_BYTES = 256 << 20
"""Maximum memory of an xz decoder: its dictionary. `xz -9` needs 65 MiB."""

_MAGIC = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "bzip2": rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)",
    "xz": rb"\xfd7zXZ\x00",
    "lzma": rb"[\x5d\x6d]\x00\x00.{2}(?:\xff{8}|.{4}\x00{4})",
    "lz4": rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",
    "compress": rb"\x1f[\x9d\xa0]",
    "pack": rb"\x1f\x1e",
    "lzip": rb"LZIP[\x00\x01]",
    "lzop": rb"\x89LZO\x00",
    "snappy": rb"\xff\x06\x00\x00sNaPpY",
    "lzfse": rb"bvx[2n\-]",
}
_PATTERNS = {name: re.compile(pattern, re.DOTALL) for name, pattern in _MAGIC.items()}


class Damaged(Exception):
    """The file is unreadable from some position on. The rows yielded before are valid."""


def packing_of(head: bytes) -> str | None:
    """The name of the packing of a file that begins with `head`, or None for a file that is not packed."""
    return next((name for name, pattern in _PATTERNS.items() if pattern.match(head)), None)


def unpacked(file: Path, packing: str | None, start: int = 0) -> Iterator[bytes]:
    """The unpacked content from its byte `start` on, in blocks of at most `BLOCK` bytes.

    Raises:
        Damaged: after all that can be decoded, for data that is corrupt, truncated or packed in another way.
    """
    if packing is None:
        with file.open("rb") as plain:
            plain.seek(start)
            while block := plain.read(BLOCK):
                yield block
    elif packing == "zstd":
        yield from _skip(_zstd(file), start)
    elif packing in _DECODERS:
        with file.open("rb") as packed:
            yield from _skip(_decoded(packed, packing, _DECODERS[packing]), start)
    else:
        raise Damaged(f"is packed with {packing}; unpack it, or pack it with gzip or zstd")


def _skip(blocks: Iterator[bytes], number: int) -> Iterator[bytes]:
    """The blocks without their first bytes."""
    for block in blocks:
        if number < len(block):
            yield block[number:]
        number = max(0, number - len(block))


class _Gzip:
    """zlib's decoder with the interface of `bz2.BZ2Decompressor` and `lzma.LZMADecompressor`."""

    def __init__(self) -> None:
        self._state = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._state.decompress(self._state.unconsumed_tail + data, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._state.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._state.eof

    @property
    def unused_data(self) -> bytes:
        return self._state.unused_data


_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_LZMA_BYTES),
    "lzma": lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE, MAX_LZMA_BYTES),
}


def _decoded(packed: BinaryIO, packing: str, new: Callable[[], Any]) -> Iterator[bytes]:
    """Decode all streams of a file. Between and after them zero bytes are padding, as tapes and xz write it."""
    decoder = new()
    try:
        while data := packed.read(BLOCK):
            while data or not (decoder.needs_input or decoder.eof):
                if decoder.eof:
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    decoder = new()
                if block := decoder.decompress(data, BLOCK):
                    yield block
                data = decoder.unused_data if decoder.eof else b""
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(f"corrupt {packing} data ({error})") from None
    if not decoder.eof:
        raise Damaged(f"truncated {packing} data")


def _zstd(file: Path) -> Iterator[bytes]:
    """Decode zstd with pyarrow, whose `read` discards what it has decoded when the data ends early.

    After an error the file is therefore read again, from the last complete block on byte by byte.
    """
    from pyarrow import CompressedInputStream, OSFile  # imported late: reading a recipe imports this module

    done = 0
    try:
        with OSFile(str(file)) as packed, CompressedInputStream(packed, "zstd") as stream:
            while block := stream.read(BLOCK):
                yield block
                done += len(block)
        return
    except OSError as error:
        if error.errno is not None:
            raise
        reason = error
    rest = bytearray()
    try:
        with OSFile(str(file)) as packed, CompressedInputStream(packed, "zstd") as stream:
            while done:
                done -= len(stream.read(min(done, BLOCK)))
            while byte := stream.read(1):
                rest += byte
    except OSError as error:
        reason = error
    if rest:
        yield bytes(rest)
    what = "truncated" if "runcated" in str(reason) else "corrupt"
    raise Damaged(f"{what} zstd data ({str(reason).strip().splitlines()[0]})")
