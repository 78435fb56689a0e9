"""Rows of JSON: a line each (JSONL), or the elements of one array, parsed as the file is read.

`.json` means four things in practice: an array of rows, an object that holds one such list beside other things, lines
of JSON under the wrong name, and configuration, which is text. `json_kind` tells them apart by the first megabyte.

`json.loads` per line reads 370 MB/s of text a core, which is more than everything after it. Rejected: event parsers
(ijson is ten times slower, and one more dependency) and loading an array whole (a 10 GB export is common).
"""

import codecs
import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Literal

from ingot.corpus.readers.files import BadRow, Damaged, Row, blocks, lines

MOST_ROW = 64 << 20
"""Characters of one element of an array; more means that a bracket was never closed."""
MOST_OBJECT = 128 << 20
"""Bytes of an object that holds a list of rows: it is parsed whole, since the list may stand anywhere in it."""
HEAD = 1 << 20
"""Bytes of a file by which its kind is told."""

_BLANK = re.compile(r"[ \t\n\r]*")
_AFTER = tuple(",] \t\n\r")
_DECODER = json.JSONDecoder()


def json_kind(file: Path, names: Container[str], or_text: bool) -> Literal["text", "jsonl", "json"]:
    """How a `.json` file is to be read.

    Args:
        file: may be compressed.
        names: fields of which a row has at least one.
        or_text: whether what is no table of rows is a document, as any configuration file is.

    Raises:
        Damaged: the file cannot be decompressed.
    """
    head = _head(file)
    if head.startswith(b"["):
        return "text" if or_text and not head[1:].lstrip().startswith(b"{") else "json"
    first, _, rest = head.partition(b"\n")
    rest = rest.lstrip()
    if rest.startswith(b"{") and any(isinstance(parse(line, 0), dict) for line in (first, rest.partition(b"\n")[0])):
        return "jsonl"  # of which one line may be malformed
    if not or_text:
        return "json"
    try:
        row = _rows_in_object(file, names)[0]
    except Damaged:
        return "text"
    return "json" if _is_row(row, names) else "text"


def jsonl_rows(file: Path) -> Iterator[Row]:
    """One row a line; blank lines are none. Raises Damaged."""
    for line, offset, data in lines(file):
        if data.strip():
            yield Row(parse(data, offset), offset, line, bytes=len(data))


def json_rows(file: Path, names: Container[str]) -> Iterator[Row]:
    """The elements of the array, or of the one list in the object, that the file is; or the object, if it is a row.

    Args:
        file: may be compressed.
        names: fields of which a row has at least one.

    Raises:
        Damaged: it is none of these, or stops being JSON.
    """
    text = _Values(file)
    values = text.array() if text.peek() == "[" else _rows_in_object(file, names)
    for number, value in enumerate(values):
        yield Row(value, number, row=number + 1)


def parse(data: bytes, offset: int) -> Any:
    """The value of a line, or a `BadRow`. `offset`: byte of the line in its file."""
    try:
        value = json.loads(data.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}")
    return _without_surrogates(value) if b"\\ud" in data or b"\\uD" in data else value


def _without_surrogates(value: Any) -> Any:
    """json.loads lets half of a surrogate pair through, which is no character and cannot be stored."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow("found half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value


def _head(file: Path) -> bytes:
    """The first `HEAD` bytes, of an object to the end of its line, without what stands before the first sign."""
    data = bytearray()
    for block in blocks(file):
        data += block
        whole = b"\n" in data[:-1] or not _begun(data[:HEAD]).startswith(b"{") or len(data) > MOST_ROW
        if len(data) >= HEAD and whole:
            break
    return _begun(data)


def _begun(data: bytearray) -> bytes:
    return bytes(data).removeprefix(codecs.BOM_UTF8).lstrip()


def _rows_in_object(file: Path, names: Container[str]) -> list[Any]:
    data = bytearray()
    for block in blocks(file):
        data += block
        if len(data) > MOST_OBJECT:
            raise Damaged(
                f"a JSON object of more than {MOST_OBJECT >> 20} MB, which cannot be read row by row; "
                "save its list of rows as an array or as JSONL"
            )
    value = parse(bytes(data), 0)
    if isinstance(value, BadRow):
        raise Damaged(str(value))
    if not isinstance(value, dict):
        raise Damaged("no JSON array or object of rows")
    if _is_row(value, names):
        return [value]
    found = {name: rows for name, rows in value.items() if _is_table(rows)}
    if len(found) != 1:
        names = ", ".join(f"'{name}'" for name in (found or value)) or "nothing"
        which = "several lists" if found else "no list"
        raise Damaged(f"a JSON object with {which} of rows (found {names}), expected an array, or one list of objects")
    return next(iter(found.values()))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict | list)


def _is_row(value: Any, names: Container[str]) -> bool:
    return isinstance(value, dict) and any(name in names for name in value)


class _Values:
    """JSON values one after another from text that is read as they are asked for."""

    def __init__(self, file: Path):
        self._blocks = blocks(file)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._read = self._dropped = 0  # bytes read, characters no longer held
        self._ended = False

    def array(self) -> Iterator[Any]:
        """The elements of the array that starts here; half surrogates are a `BadRow`."""
        self._take("[")
        if self.peek() == "]":
            return
        while True:
            yield self._value()
            if self.peek() == "]":
                break
            self._take(",")
        self._take("]")
        if rest := self.peek():
            raise Damaged(f"malformed JSON: {rest!r} after the array, at character {self._place(self._at)}")

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            self._at = _end(self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _take(self, sign: str) -> None:
        found = self.peek()
        if found != sign:
            place = f"{found!r} at character {self._place(self._at)}" if found else "the end of the file"
            raise Damaged(f"malformed JSON: found {place}, expected '{sign}'")
        self._at += 1

    def _value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                place = self._place(error.pos)
                if self._more():
                    continue
                raise Damaged(f"malformed JSON: {error.msg} at character {place}") from None
            except (ValueError, RecursionError) as error:
                raise Damaged(f"malformed JSON: {error}") from None
            ended = self._text[end : end + 1] in _AFTER or not isinstance(value, int | float)
            if not ended and self._more():
                continue  # a number may go on where the text was cut: "1", "1.", "1.5"
            half = "\\ud" in self._text[self._at : end].lower()
            self._at = end
            return _without_surrogates(value) if half else value

    def _more(self) -> bool:
        """Read on, as much again as is held, so that a long value is not parsed once for every block."""
        held = self._text[self._at :]
        if len(held) > MOST_ROW:
            raise Damaged(f"a row of more than {MOST_ROW >> 20} million characters; is a bracket not closed?")
        parts, wanted = [held], len(held) + 1
        while wanted > 0 and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            parts.append(self._decode(block))
            wanted -= len(parts[-1])
        self._dropped, self._text, self._at = self._dropped + self._at, "".join(parts), 0
        return len(self._text) > len(held)

    def _decode(self, block: bytes) -> str:
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            place = self._read - waiting + error.start
            raise Damaged(f"byte {place} (0x{error.object[error.start]:02x}) is not UTF-8") from None
        self._read += len(block)
        return text

    def _place(self, at: int) -> int:
        return self._dropped + at + 1


def _end(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    assert found is not None, "the pattern matches the empty string"
    return found.end()
