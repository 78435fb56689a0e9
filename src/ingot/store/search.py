"""Finds a phrase in a token store: a suffix array over the text that its ids decode to.

The index is over bytes, not over ids, because the ids of a phrase depend on what stands around it (a blank before it, a
word that goes on after it), so that a search for ids would miss places. The text is that of the ids, as the model reads
it. A byte that no text contains stands for each special token and ends each document, so no match spans two documents,
or two messages of a conversation.

The index is a directory in that of the store, named by a digest of the store, and is deleted with it:

    part-00000.text, part-00000.suffixes    complete documents of about `PART_BYTES`, and the suffix array of that text
    ends.bin                                i64 per document: the position after its last byte in all text
    pieces.bin                              u32 per id: its bytes
    manifest.json                           sizes and digests of the files; written last

Parts bound the memory of the build, and are what a killed build keeps. The index takes 5 bytes for each byte of text.
To open it checks sizes only, because digests would take a second a gigabyte; `ingot verify` checks them.
"""

import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ingot.core.artifact import (
    MANIFEST,
    StageDir,
    atomic_json,
    atomic_open,
    atomic_write,
    digest_json,
    file_problems,
    file_record,
    read_json,
)
from ingot.core.errors import UserError
from ingot.core.events import Display, size
from ingot.core.process import available_memory
from ingot.store.reader import Store
from ingot.store.suffix_array import BUILD_BYTES, find, longest_prefix, suffix_array
from ingot.tokenizer.base import Tokenizer

VERSION = 2
PART_BYTES = 32 << 20
"""Text of a part, unless one document is longer."""
SEPARATOR = 0xFF
"""The byte of special tokens and of ends of documents, which UTF-8 never uses."""
ENDS, PIECES = "ends.bin", "pieces.bin"
_NAME = "search-"
"""Begin of the name of an index."""
_SUFFIX_BYTES = 4
"""Of an entry of the suffix array."""
INDEX_BYTES = 1 + _SUFFIX_BYTES
"""Bytes on disk for each byte of text."""
_CHUNK = 1 << 20
"""Ids that are decoded at once."""


class Place(NamedTuple):
    """A place of a phrase in a store."""

    document: int
    start: int
    """Position of its first byte in all text."""


class SearchIndex:
    """The open index of a store. Use `open_index`."""

    def __init__(self, store: Store, path: Path):
        self.store, self.path = store, path
        manifest = _read_manifest(path)
        if problem := next(file_problems(path, manifest["files"], digests=False), None):
            raise UserError(_again(problem, path))
        self.ends = np.memmap(path / ENDS, "<i8", mode="r").view(np.ndarray)
        self._piece_bytes = np.fromfile(path / PIECES, "<u4")
        self._parts = [_Part(path, number) for number in range(manifest["parts"])]
        self._firsts = np.cumsum([0, *(len(part.text) for part in self._parts)])

    def count(self, phrase: bytes) -> int:
        """Number of places of a phrase."""
        return sum(last - first for first, last in (part.find(phrase) for part in self._parts))

    def places(self, phrase: bytes) -> Iterator[Place]:
        """All places of a phrase, in the order of the text."""
        for part, base in zip(self._parts, self._firsts.tolist(), strict=False):
            first, last = part.find(phrase)
            for start in np.sort(part.suffixes[first:last]).tolist():
                yield Place(int(np.searchsorted(self.ends, base + start, side="right")), base + start)

    def longest_prefix(self, phrase: bytes) -> int:
        """Number of bytes of the longest prefix of a phrase that is in the store."""
        return max((part.longest_prefix(phrase) for part in self._parts), default=0)

    def tokens(self, place: Place, length: int) -> tuple[int, int]:
        """The positions [start, stop) in the store of the ids that encode `length` bytes at a place."""
        start, stop = self.store.span(place.document)
        ends = np.cumsum(self._piece_bytes[self.store.ids.read(start, stop)], dtype=np.int64)
        offset = place.start - self._document_start(place.document)
        first, last = np.searchsorted(ends, [offset, offset + length - 1], side="right")
        return start + int(first), start + int(last) + 1

    def around(self, place: Place, length: int, context: int) -> tuple[str, str]:
        """Up to `context` bytes of text before and after a phrase, of its document or message only."""
        number = int(np.searchsorted(self._firsts, place.start, side="right")) - 1
        text, start = self._parts[number].text, place.start - int(self._firsts[number])
        before = text[max(0, start - context) : start].rpartition(bytes([SEPARATOR]))[2]
        after = text[start + length : start + length + context].partition(bytes([SEPARATOR]))[0]
        return before.decode(errors="ignore"), after.decode(errors="ignore")  # a character may be cut

    def document_text(self, document: int) -> bytes:
        """The text of a document, with separators."""
        first = self._document_start(document)
        number = int(np.searchsorted(self._firsts, first, side="right")) - 1
        base = int(self._firsts[number])
        return self._parts[number].text[first - base : int(self.ends[document]) - base]

    def _document_start(self, document: int) -> int:
        return int(self.ends[document - 1]) if document else 0


class _Part:
    """A part of an index: its text and its suffix array, as memory maps."""

    def __init__(self, path: Path, number: int):
        text, suffixes = _part_files(path, number)
        with text.open("rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.suffixes = np.memmap(suffixes, "<i4", mode="r").view(np.ndarray)

    def find(self, phrase: bytes) -> tuple[int, int]:
        return find(self.text, self.suffixes, phrase)

    def longest_prefix(self, phrase: bytes) -> int:
        return longest_prefix(self.text, self.suffixes, phrase)


def open_index(store: Store, tokenizer: Tokenizer, display: Display) -> SearchIndex:
    """Open the index of a store; it is built first if it is not there, or completed if its build was interrupted.

    Raises:
        UserError: it does not fit the memory or the disk, its directory cannot be written, or a file is damaged.
    """
    assert store.tokenizer == tokenizer.fingerprint
    assert store.documents, "an empty store has no index"
    path = store.path / f"{_NAME}{digest_json([VERSION, PART_BYTES, store.fingerprint])[:12]}"
    if not (path / MANIFEST).exists():
        with StageDir(path).lock(lambda owner: display.notify(f"{path}: process {owner} builds it; waiting")):
            if not (path / MANIFEST).exists():
                _Builder(store, tokenizer, path, display).build()
    return SearchIndex(store, path)


def index_problems(directory: Path) -> Iterator[str]:
    """What is wrong with the files of the indexes below a directory, as messages. Reads all of them."""
    for manifest in sorted(directory.glob(f"**/{_NAME}*/{MANIFEST}")):
        path = manifest.parent
        try:
            yield from (_again(problem, path) for problem in file_problems(path, _read_manifest(path)["files"]))
        except UserError as error:
            yield str(error)


def _read_manifest(path: Path) -> dict[str, Any]:
    """{parts, files} of an index: the number of its parts, and `file_record` of each file.

    Raises:
        UserError: it is damaged.
    """
    try:
        manifest = read_json(path / MANIFEST)
        if isinstance(manifest["parts"], int) and all(
            {"bytes", "blake2b"} <= f.keys() for f in manifest["files"].values()
        ):
            return manifest
    except (UserError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(_again(f"{path / MANIFEST}: is damaged", path))


def _again(problem: str, path: Path) -> str:
    return f"{problem}; delete {path} and search again"


class _Builder:
    """Builds an index, part by part."""

    def __init__(self, store: Store, tokenizer: Tokenizer, path: Path, display: Display):
        self.store, self.path, self.display = store, path, display
        pieces = [
            tokenizer.token_bytes(token) if length else bytes([SEPARATOR])
            for token, length in enumerate(tokenizer.lengths.tolist())
        ]
        self._piece_bytes = np.array([*map(len, pieces)], np.int64)
        self._piece_starts = np.cumsum(self._piece_bytes) - self._piece_bytes
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)

    def build(self) -> None:
        ends = self._text_ends()
        parts = _parts(ends)
        left = [part for part in parts if not part.is_written(self.path)]
        self._check_space(parts, left)
        total = int(ends[-1])
        done = total - sum(part.bytes for part in left)
        self.display.notify(f"{self.path}: an index of {size(INDEX_BYTES * total)} to search in, built once")
        with self.display.bar(f"indexing {size(total)} of text", total, "bytes", done) as bar:
            for part in left:
                self._write_part(part, ends)
                bar.advance(part.bytes)
        atomic_write(self.path / ENDS, ends.astype("<i8").tobytes())
        atomic_write(self.path / PIECES, self._piece_bytes.astype("<u4").tobytes())
        files = [self.path / ENDS, self.path / PIECES, *(file for part in parts for file in part.files(self.path))]
        atomic_json(self.path / MANIFEST, {"parts": len(parts), "files": {f.name: file_record(f) for f in files}})
        for old in self.path.parent.glob(f"{_NAME}*"):
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)

    def _text_ends(self) -> np.ndarray:
        """The end of each document in all text [documents] (int64)."""
        ends, out, total = self.store.ends.astype(np.int64), np.zeros(self.store.documents, np.int64), 0
        for start in range(0, self.store.tokens, _CHUNK):
            stop = min(start + _CHUNK, self.store.tokens)
            sums = np.cumsum(self._piece_bytes[self.store.ids.read(start, stop)])
            first, last = np.searchsorted(ends, [start, stop], side="right")
            out[first:last] = total + sums[ends[first:last] - start - 1]
            total += int(sums[-1])
        return out + np.arange(1, len(out) + 1)

    def _check_space(self, parts: list["_PartRange"], left: list["_PartRange"]) -> None:
        longest = max(part.bytes for part in parts)
        if longest >= 2**31:
            raise UserError(
                f"{self.store.path}: found a document of {size(longest)}, expected at most 2.1 GB to search"
            )
        needed = {
            "memory": (BUILD_BYTES * max((part.bytes for part in left), default=0), available_memory()),
            "disk": (INDEX_BYTES * sum(part.bytes for part in left), shutil.disk_usage(self.path).free),
        }
        for what, (expected, found) in needed.items():
            if found < expected:
                raise UserError(
                    f"{self.path}: found {size(found)} of free {what}, expected {size(expected)} for the index of "
                    f"{size(sum(part.bytes for part in parts))} of text; free some and run again"
                )

    def _write_part(self, part: "_PartRange", ends: np.ndarray) -> None:
        text = np.full(part.bytes, SEPARATOR, np.uint8)
        of_documents = np.ones(part.bytes, bool)
        of_documents[ends[part.first : part.last] - part.start - 1] = False
        (start, _), (_, stop) = self.store.span(part.first), self.store.span(part.last - 1)
        chunks = range(start, stop, _CHUNK)
        decoded = [self._decode(self.store.ids.read(first, min(first + _CHUNK, stop))) for first in chunks]
        text[of_documents] = np.concatenate([np.empty(0, np.uint8), *decoded])
        for file, values in zip(part.files(self.path), (text, suffix_array(text)), strict=True):
            with atomic_open(file) as opened:
                opened.write(values.data)

    def _decode(self, ids: np.ndarray) -> np.ndarray:
        lengths = self._piece_bytes[ids]
        shifts = self._piece_starts[ids] - np.cumsum(lengths) + lengths
        return self._bytes[np.repeat(shifts, lengths) + np.arange(lengths.sum())]


class _PartRange(NamedTuple):
    """The documents `first` to `last` (exclusive) as a part, whose text is `bytes` long and begins at `start`."""

    number: int
    first: int
    last: int
    start: int
    bytes: int

    def files(self, path: Path) -> tuple[Path, Path]:
        return _part_files(path, self.number)

    def is_written(self, path: Path) -> bool:
        """Whether both files are there, and complete."""
        sizes = self.bytes, _SUFFIX_BYTES * self.bytes
        return all(f.exists() and f.stat().st_size == size for f, size in zip(self.files(path), sizes, strict=True))


def _parts(ends: np.ndarray) -> list[_PartRange]:
    parts, first = [], 0
    while first < len(ends):
        start = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, start + PART_BYTES, side="right")))
        parts.append(_PartRange(len(parts), first, last, start, int(ends[last - 1]) - start))
        first = last
    return parts


def _part_files(path: Path, number: int) -> tuple[Path, Path]:
    """The files of a part: its text and its suffix array."""
    return path / f"part-{number:05d}.text", path / f"part-{number:05d}.suffixes"
