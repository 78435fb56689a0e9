"""Files to batches of raw documents. A reader never dies of one bad line: it says where and why, and goes on.

Own JSONL reading, because no engine's survives real data (measured: one malformed line ends Daft, Polars and pyarrow
without naming it; datatrove loses the whole file on one bad byte). `json.loads` per line reads 370 MB/s of text a
core, which is more than everything after it.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ingot.core.errors import UserError
from ingot.corpus.documents import dump_messages
from ingot.corpus.funnel import Quarantined
from ingot.corpus.python_sources import docs_pairs, docs_texts
from ingot.corpus.settings import DOCS, STDLIB, CorpusSettings, Source
from ingot.corpus.sources import InputFile, locate

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 8 << 20
_BLOCK = 1 << 20
ROLES = frozenset({"system", "user", "assistant", "tool"})

RAW = pa.schema(
    {"text": pa.string(), "source": pa.string(), "path": pa.string(), "offset": pa.int64(), "group": pa.string()}
)


class Raw(NamedTuple):
    """A document as read: the columns of `RAW`."""

    text: str
    source: str
    path: str
    offset: int
    group: str


Quarantine = Callable[[Quarantined], None]


class Damaged(Exception):
    """A compressed file that stops being readable; what came before it is good."""


class _BadLine(Exception):
    """Why a line is no document."""


def read(settings: CorpusSettings, quarantine: Quarantine) -> Iterator[pa.Table]:
    """All documents of all sources, in order, in batches of at most 1024 documents or about 8 MB.

    Args:
        settings: of the stage.
        quarantine: is called with everything that could not be read.

    Raises:
        UserError: a source is missing or empty, or a JSONL file has no usable line.
    """
    raws = (raw for source in settings.sources for raw in _read_source(source, settings, quarantine))
    yield from _batches(raws)


def _batches(raws: Iterable[Raw]) -> Iterator[pa.Table]:
    rows: list[Raw] = []
    characters = 0
    for raw in raws:
        rows.append(raw)
        characters += len(raw.text)
        if len(rows) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield _table(rows)
            rows, characters = [], 0
    if rows:
        yield _table(rows)


def _table(rows: list[Raw]) -> pa.Table:
    return pa.table([pa.array(c, t) for c, t in zip(zip(*rows, strict=True), RAW.types, strict=True)], schema=RAW)


def _read_source(source: Source, settings: CorpusSettings, quarantine: Quarantine) -> Iterator[Raw]:
    chat = settings.format == "chat"
    files = locate(source)
    if chat and source.path == STDLIB:
        raise UserError(
            f'sources: {STDLIB} is plain text, but format = "chat"; use {DOCS}, or a JSONL file of messages'
        )
    if source.path == DOCS:
        make = docs_pairs if chat else docs_texts
        for file in files:
            for number, text in enumerate(make(file.file, file.group)):
                yield Raw(text, source.path, file.path, number, file.group)
        return
    for file in files:
        if file.kind == "jsonl":
            yield from _read_jsonl(file, source, settings, quarantine)
        elif chat:
            raise UserError(
                f'sources: {file.path} is plain text, but format = "chat" reads .jsonl, .jsonl.gz or .jsonl.zst'
            )
        else:
            yield from _read_text(file, source, quarantine)


def _read_text(file: InputFile, source: Source, quarantine: Quarantine) -> Iterator[Raw]:
    data = bytearray()
    try:
        for block in _blocks(file.file):
            data += block
        yield Raw(data.decode(), source.path, file.path, 0, file.group)
    except Damaged as error:
        quarantine(Quarantined(source.path, file.path, 0, len(data), len(data), str(error)))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        kind = "binary, not text" if b"\0" in data[:8192] else "not UTF-8"
        reason = f"byte {error.start} (0x{data[error.start]:02x}) is {kind}; save the file as UTF-8"
        quarantine(Quarantined(source.path, file.path, line, error.start, len(data), reason))


def _read_jsonl(file: InputFile, source: Source, settings: CorpusSettings, quarantine: Quarantine) -> Iterator[Raw]:
    field = source.field or settings.field
    extract = _messages if settings.format == "chat" else _text
    good, first, line, end = 0, None, 0, 0

    def reject(line: int, offset: int, size: int, reason: str) -> None:
        nonlocal first
        record = Quarantined(source.path, file.path, line, offset, size, reason)
        first = first or record
        quarantine(record)

    try:
        for line, offset, data in _lines(file.file):
            end = offset + len(data)
            if not data.strip():
                continue
            try:
                text = extract(_parse(data, offset), field)
            except _BadLine as error:
                reject(line, offset, len(data), str(error))
                continue
            good += 1
            yield Raw(text, source.path, file.path, offset, file.group)
    except Damaged as error:
        reject(line + 1, end, 0, f"{error} after {good} readable rows")
    if first is not None and not good:
        raise UserError(
            f"sources: {first.sentence()}; no line of this file is usable: mend it or remove it from sources"
        )


def _parse(data: bytes, offset: int) -> dict[str, Any]:
    try:
        text = data.decode("utf-8-sig" if offset == 0 else "utf-8")
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise _BadLine(f"byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"malformed JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"malformed JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadLine(f"found a JSON {_type(row)}, expected an object with a field for the document")
    # json.loads lets half a surrogate pair through, which is no character and cannot be stored.
    if (b"\\ud" in data or b"\\uD" in data) and _has_surrogate(row):
        raise _BadLine("found half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return row


def _has_surrogate(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _field(row: dict[str, Any], field: str) -> Any:
    if field not in row:
        found = ", ".join(f"'{name}'" for name in row) or "none"
        raise _BadLine(f"no field '{field}', found {found}; set `field` to the one that holds the document")
    return row[field]


def _text(row: dict[str, Any], field: str) -> str:
    value = _field(row, field)
    if not isinstance(value, str):
        raise _BadLine(f"field '{field}' is a JSON {_type(value)}, expected a string")
    return value


def _messages(row: dict[str, Any], field: str) -> str:
    value = _field(row, field)
    if not isinstance(value, list) or not value:
        raise _BadLine(f"field '{field}' is a JSON {_type(value)}, expected a list of messages, at least one")
    return dump_messages([_message(m, n, field) for n, m in enumerate(value, 1)])


def _message(message: Any, number: int, field: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise _BadLine(
            f'message {number} of \'{field}\' has no string "content", expected {{"role": ..., "content": ...}}'
        )
    role = message.get("role")
    if role not in ROLES:
        raise _BadLine(f"message {number} of '{field}' has role {role!r}, expected one of {', '.join(sorted(ROLES))}")
    kept = {"role": role, "content": message["content"]}
    if "train" in message:
        if not isinstance(message["train"], bool):
            raise _BadLine(f"message {number} of '{field}' has train = {message['train']!r}, expected true or false")
        kept["train"] = message["train"]
    return kept


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset in the decompressed file, line without its newline)."""
    number, offset, carried = 0, 0, []
    for block in _blocks(file):
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


def _blocks(file: Path) -> Iterator[bytes]:
    """Decompressed content. Raises Damaged where it ends early or is corrupt."""
    try:
        if file.name.endswith(".gz"):
            yield from _gunzip(file)
        elif file.name.endswith(".zst"):
            with pa.OSFile(str(file)) as packed, pa.CompressedInputStream(packed, "zstd") as stream:
                while block := stream.read(_BLOCK):
                    yield block
        else:
            with file.open("rb") as plain:
                while block := plain.read(_BLOCK):
                    yield block
    except zlib.error as error:
        raise Damaged(f"corrupt gzip data ({error})") from None
    except (PermissionError, FileNotFoundError) as error:
        raise UserError(f"sources: {file} cannot be read ({error.strerror}); check its permissions") from None
    except OSError as error:
        if not file.name.endswith(".zst"):
            raise
        raise Damaged(f"corrupt or truncated zstd data ({error})") from None


def _gunzip(file: Path) -> Iterator[bytes]:
    """Like the gzip module, which returns nothing of the last block of a truncated file."""
    state = zlib.decompressobj(wbits=31)
    with file.open("rb") as packed:
        while data := packed.read(_BLOCK // 4):
            while data:
                if state.eof:  # a file may be several gzip members; zero bytes after the last are padding
                    data = data.lstrip(b"\0")
                    state = zlib.decompressobj(wbits=31) if data else state
                if data and (block := state.decompress(data)):
                    yield block
                data = state.unused_data if data else data
    if not state.eof:
        raise Damaged("truncated gzip data")
