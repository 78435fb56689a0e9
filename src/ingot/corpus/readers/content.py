"""What a file is, by its first bytes: how it is packed, in which encoding, and which reader reads it.

A suffix is only asked where the content allows several answers (CSV or prose). Archives, images, databases and other
files that hold no text are named, and a file whose encoding is not known for certain is not decoded: nothing is guessed
in silence.
"""

import codecs
import contextlib
import dataclasses
import json
import re
import tarfile
from pathlib import Path
from typing import Any, Literal

from ingot.corpus.readers.files import UTF8, TextFile
from ingot.corpus.readers.packing import HEAD_BYTES, Damaged, packing_of

Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "html", "warc"]

SNIFF_BYTES = 1 << 20
"""Number of unpacked bytes from which the content is told."""
MAX_CONTROL_FRACTION = 0.01
"""A text has at most this fraction of control characters."""

_UNPACK = "unpack it and name its files or its directory"
_EXPORT = "save its text as plain text or as rows"
_MAGIC: dict[str, tuple[str, bytes]] = {
    "a pointer of Git LFS": (
        "fetch the file itself with `git lfs pull`",
        rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v",
    ),
    "a pointer of git-annex": ("fetch the file itself with `git annex get`", rb"/annex/objects/\S+\n?\Z"),
    "an Office, EPUB or OpenDocument file": (
        _EXPORT,
        rb"PK\x03\x04.{26}(?:\[Content_Types\]|_rels/|word/|xl/|ppt/|mimetype)",
    ),
    "a ZIP archive (or a NumPy, PyTorch, Keras or Java file)": (_UNPACK, rb"PK(?:\x03\x04|\x05\x06|\x07\x08|00PK)"),
    "a 7z archive": (_UNPACK, rb"7z\xbc\xaf\x27\x1c"),
    "a RAR archive": (_UNPACK, rb"Rar!\x1a\x07"),
    "a cpio archive": (_UNPACK, rb"0707(?:0[127])[0-9A-Fa-f]{8}|\xc7\x71|\x71\xc7"),
    "an ar archive": (_UNPACK, rb"!<(?:arch|thin)>\n"),
    "an ARC archive, older than WARC": ("write the texts of its pages as rows", rb"filedesc://"),
    "a cabinet archive": (_UNPACK, rb"MSCF\x00{4}"),
    "a xar archive": (_UNPACK, rb"xar!\x00"),
    "an ARJ or LHA archive": (_UNPACK, rb"\x60\xea.|.{2}-l[hz][0-9ds]-"),
    "an RPM package": (_UNPACK, rb"\xed\xab\xee\xdb"),
    "a PDF document": (_EXPORT, rb"\s{0,16}%PDF-[0-9]"),
    "an RTF document": (_EXPORT, rb"\{\\rtf[0-9]?[\\\s{}]"),
    "a document of an older Office": (_EXPORT, rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    "a DjVu document": (_EXPORT, rb"AT&TFORM"),
    "an image": (
        "remove it",
        rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a.{2,7}[\x00\x80-\xff]|BM.{4}\x00{4}|II\*\x00|MM\x00\*|RIFF.{4}WEBP|"
        rb"8BPS\x00|\x00\x00\x01\x00.\x00|.{4}ftyp(?:avif|heic|mif1)|\x00{3}\x0cjP  ",
    ),
    "audio or video": (
        "remove it",
        rb"ID3[\x02-\x04]\x00|OggS\x00|fLaC\x00|RIFF.{4}(?:WAVE|AVI )|.{4}ftyp|\x1aE\xdf\xa3|\xff[\xf1\xf9\xfb\xfa\xf3]"
        rb"|\x00\x00\x01\xba|FLV\x01|MThd\x00",
    ),
    "an SQLite database": (_EXPORT, rb"SQLite format 3\x00"),
    "a pickle": (_EXPORT, rb"\x80[\x02-\x05].|\((?:lp|dp)[01]\r?\n|c(?:copy_reg|copyreg|__builtin__|builtins)\n\w+\n"),
    "a NumPy array": (_EXPORT, rb"\x93NUMPY"),
    "an HDF5 file": (_EXPORT, rb"\x89HDF\r\n\x1a\n"),
    "an Arrow or Feather file": (_EXPORT, rb"ARROW1\x00|FEA1|\xff{4}[^\x00].{2}\x00\x10\x00\x00\x00"),
    "an ORC file": (_EXPORT, rb"ORC[\x00-\x08\x0e-\x1f\x7f-\xff]"),
    "an Avro file": (_EXPORT, rb"Obj\x01"),
    "an R data file": (_EXPORT, rb"RDX[23]\n|X\n\x00{3}[\x02\x03]"),
    "a MATLAB file": (_EXPORT, rb"MATLAB 5\.0 MAT-file"),
    "safetensors": ("remove it", rb"[^\x00].{4}\x00{3}\{\""),
    "a GGUF file": ("remove it", rb"GGUF[\x01-\x09]\x00"),
    "a program": (
        "remove it",
        rb"\x7fELF|MZ.{0,64}\x00|\xcf\xfa\xed\xfe|\xce\xfa\xed\xfe|\xfe\xed\xfa[\xce\xcf]|\xca\xfe\xba\xbe|\x00asm",
    ),
    "compiled Python": ("remove it", rb".{2}\r\n.{1,12}\x00"),
    "a Git pack": ("remove it", rb"PACK\x00\x00\x00[\x02\x03]"),
    "a font": ("remove it", rb"OTTO\x00|wOF[F2][\x00-\x01]|\x00\x01\x00\x00\x00"),
}
"""What a file is -> (what to do, pattern of its first bytes). The first match counts."""
_PATTERNS = {name: (advice, re.compile(pattern, re.DOTALL)) for name, (advice, pattern) in _MAGIC.items()}

_MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark -> encoding."""
_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r"})
_C1 = re.compile(rb"\xc2[\x80-\x84\x86-\x9f]")
_ISO_2022 = re.compile(rb"\x1b(?:\$[@AB]|\$?\([BIJCD])")


def identify(file: Path, encoding: str | None, max_bytes: int) -> tuple[TextFile, bytes]:
    """How to read a file, and its first `SNIFF_BYTES` as UTF-8, without a byte order mark.

    Args:
        file: a regular file.
        encoding: the codec that the recipe names, or None.
        max_bytes: maximum size of a row.

    Raises:
        Damaged: the file holds no text, or its encoding is not known.
    """
    with file.open("rb") as raw:
        packing = packing_of(raw.read(HEAD_BYTES))
    head = _head(TextFile(file, packing))
    if head.startswith(b"PAR1"):
        return TextFile(file, packing), head
    packed = f" packed with {packing}" if packing else ""
    if inner := packing_of(head[:HEAD_BYTES]) if packing else None:
        raise Damaged(f"is packed twice, with {inner} and then {packing}; unpack it once")
    if found := _signature(head):
        raise Damaged(f"is {found[0]}{packed}, not text; {found[1]}")
    mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
    if not mark and (wide := _wide_encoding(head)) and wide != encoding:
        raise Damaged(f'looks like {wide} without a byte order mark; set encoding = "{wide}" of the source')
    if not mark and encoding and encoding != UTF8 and _is_utf8(head):
        raise Damaged(f'is UTF-8, but its source has encoding = "{encoding}"; name this file as a source of its own')
    text = TextFile(file, packing, _MARKS[mark] if mark else encoding or UTF8, max_bytes)
    head = head if text.encoding == UTF8 else _head(text)
    newline = b"\r" if b"\r" in head and b"\n" not in head else b"\n"
    return dataclasses.replace(text, newline=newline), head.removeprefix(codecs.BOM_UTF8)


def content_kind(head: bytes, kind: Kind, is_source: bool = False) -> Kind:
    """The reader for a file that begins with `head`.

    Args:
        head: the beginning of the file, as `identify` returns it.
        kind: what the suffix says.
        is_source: the suffix says source code or markup, which may begin like JSON.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    if _WARC.match(head):
        return "warc"
    if kind in ("text", "html") and _HTML.match(head):
        return "html"
    first, _, rest = head.replace(b"\r", b"\n").lstrip().partition(b"\n")
    second = rest.lstrip().partition(b"\n")[0]
    if not first.startswith((b"{", b"[")):
        return _separated_kind(first, second, kind) if kind in ("csv", "tsv") else kind
    if _are_objects(first, second, one_suffices=kind == "text"):
        return "jsonl"
    if kind == "jsonl":  # an array, or objects over several lines
        is_array = first.startswith(b"[") and ((array := _parsed(first)) is None or (not second and _are_rows(array)))
        return "json" if is_array or first.rstrip() in (b"{", b"[", b"[{") else kind
    is_json = kind == "text" and _JSON.match(first + b"\n" + rest) and not (is_source and _parsed(head) is None)
    return "json" if is_json else kind


_WARC = re.compile(rb"WARC/[01]\.[0-9]+\r?\n")
_HTML = re.compile(rb"(?is)(?:\s|<!--.*?-->|<\?xml[^>]*>)*<(?:!doctype\s+html|html[\s>]|head[\s>]|body[\s>])")
_JSON = re.compile(rb'\[\s*(?:\{\s*["}]|\[\s*["\d{\[])|\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
"""The beginning of an array of objects or arrays, or of an object."""


def _are_objects(first: bytes, second: bytes, one_suffices: bool) -> bool:
    """Whether two lines are JSON objects; one valid line of two is enough, since the other may be malformed."""
    lines = [first, second] if second else [first] if one_suffices else []
    return all(line.startswith(b"{") for line in lines) and any(isinstance(_parsed(line), dict) for line in lines)


def _are_rows(array: Any) -> bool:
    """Whether a JSON array is a table of rows, and not the messages of one conversation."""
    return (
        isinstance(array, list)
        and bool(array)
        and all(isinstance(row, dict) and not ({"role", "from"} & {*row}) for row in array)
    )


def _separated_kind(header: bytes, second: bytes, kind: Kind) -> Kind:
    """CSV or TSV, by the separator in the header; the suffix decides if both or neither are in it."""
    own, other = (b",", b"\t") if kind == "csv" else (b"\t", b",")
    separators = header.count(other)
    is_other = own not in header and separators and (not second or second.count(other) >= separators)
    return ("tsv" if kind == "csv" else "csv") if is_other else kind


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def not_text(data: bytes) -> str | None:
    """The reason why UTF-8 bytes are no text: NUL, or more than 1 % of control characters; None for text."""
    if b"\0" in data:
        return f"byte {data.index(0):,} is NUL: this is binary, not text"
    if escape := _ISO_2022.search(data):
        return f'byte {escape.start():,} switches to ISO-2022; set the encoding of the source, such as "iso2022_jp"'
    controls = len(data) - len(data.translate(None, _CONTROLS)) + (len(_C1.findall(data)) if b"\xc2" in data else 0)
    if controls > MAX_CONTROL_FRACTION * len(data):
        return f"{controls / len(data):.0%} are control characters: this is binary, not text"
    return None


def _head(file: TextFile) -> bytes:
    data = bytearray()
    with contextlib.suppress(Damaged):  # the reader comes to the same place, and names the rows before it
        for block in file.blocks():
            data += block
            if len(data) >= SNIFF_BYTES:
                break
    return bytes(data)


def _signature(head: bytes) -> tuple[str, str] | None:
    """(what the file is, what to do) for a file that holds no text."""
    with contextlib.suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head[:512], UTF8, "surrogateescape")  # checks the sum, as `file` does
        return "a tar archive", _UNPACK
    return next(((name, advice) for name, (advice, pattern) in _PATTERNS.items() if pattern.match(head)), None)


def _wide_encoding(head: bytes) -> str | None:
    """The encoding of text in UTF-16 or UTF-32 without a byte order mark, by the places of its zero bytes."""
    sample = head[: min(len(head), 4096) // 4 * 4]
    if b"\0" not in sample:
        return None
    zeros = [sample[i::4].count(0) / len(sample) * 4 for i in range(4)]
    for encoding, is_zero in _WIDE.items():
        if all(fraction > 0.5 if zero else fraction < 0.1 for fraction, zero in zip(zeros, is_zero, strict=True)):
            return encoding
    return None


_WIDE = {
    "utf-32-le": (False, False, True, True),
    "utf-32-be": (True, True, False, False),
    "utf-16-le": (False, True, False, True),
    "utf-16-be": (True, False, True, False),
}
"""Encoding -> which of four bytes are zero in most alphabets."""


def _is_utf8(head: bytes) -> bool:
    """Whether bytes with characters beyond ASCII are UTF-8; the last one may be cut if the file goes on."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(head, final=len(head) < SNIFF_BYTES)
    except UnicodeDecodeError:
        return False
    return not head.isascii()
