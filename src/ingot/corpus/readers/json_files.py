"""Reads rows from JSON: one per line (JSONL), or the elements of one array, parsed while the file is read.

A `.json` file can be an array of rows, an object with one such list among other fields, JSONL under the wrong name, or
configuration, which is text. `json_kind` decides by the first megabyte. Arrays are parsed incrementally because exports
of 10 GB are common.
"""

import codecs
import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Literal

from ingot.corpus.readers.files import BadRow, Damaged, Row, blocks, lines

MAX_ROW_CHARACTERS = 64 << 20
"""Maximum length of an element of an array; a longer one means that a bracket was not closed."""
MAX_OBJECT_BYTES = 128 << 20
"""Maximum size of an object with a list of rows: it is parsed at once, since the list may be anywhere in it."""
HEAD_BYTES = 1 << 20
"""Number of bytes from which `json_kind` decides."""

_BLANKS = re.compile(r"[ \t\n\r]*")
_AFTER = tuple(",] \t\n\r")
_DECODER = json.JSONDecoder()


def json_kind(file: Path, names: Container[str], or_text: bool) -> Literal["text", "jsonl", "json"]:
    """How to read a `.json` file.

    Args:
        file: may be compressed.
        names: field names of which every row has at least one.
        or_text: whether a file without rows, such as a configuration file, is a text document.

    Raises:
        Damaged: the file cannot be decompressed.
    """
    head = _head(file)
    if head.startswith(b"["):
        return "text" if or_text and not head[1:].lstrip().startswith(b"{") else "json"
    first, _, rest = head.partition(b"\n")
    rest = rest.lstrip()
    if rest.startswith(b"{") and any(isinstance(parse(line, 0), dict) for line in (first, rest.partition(b"\n")[0])):
        return "jsonl"  # one valid line of two suffices, since the other may be malformed
    if not or_text:
        return "json"
    try:
        row = _rows_in_object(file, names)[0]
    except Damaged:
        return "text"
    return "json" if _is_row(row, names) else "text"


def jsonl_rows(file: Path) -> Iterator[Row]:
    """One row per non-blank line. Raises Damaged."""
    for line, offset, data in lines(file):
        if data.strip():
            yield Row(parse(data, offset), offset, line, bytes=len(data))


def json_rows(file: Path, names: Container[str]) -> Iterator[Row]:
    """The rows of a file that is an array, an object with one list of rows, or an object that is itself a row.

    Args:
        file: may be compressed.
        names: field names of which every row has at least one.

    Raises:
        Damaged: the file is none of these, or not valid JSON.
    """
    stream = _JSONStream(file)
    values = stream.array() if stream.peek() == "[" else _rows_in_object(file, names)
    for number, value in enumerate(values):
        yield Row(value, number, row=number + 1)


def parse(data: bytes, offset: int) -> Any:
    """The value of a JSON line, or a `BadRow`. `offset` is the byte of the line in its file."""
    try:
        value = json.loads(data.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}")
    return _reject_surrogates(value) if b"\\ud" in data or b"\\uD" in data else value


def _reject_surrogates(value: Any) -> Any:
    """Replace a value with an unpaired surrogate by a `BadRow`: json.loads accepts one, but UTF-8 cannot encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow("found an unpaired surrogate (\\ud800 to \\udfff), which is no character")
    return value


def _head(file: Path) -> bytes:
    """The first `HEAD_BYTES` without leading white space; if an object comes first, more up to the end of its line."""
    data = bytearray()
    for block in blocks(file):
        data += block
        enough = b"\n" in data[:-1] or not _lstrip(data[:HEAD_BYTES]).startswith(b"{") or len(data) > MAX_ROW_CHARACTERS
        if len(data) >= HEAD_BYTES and enough:
            break
    return _lstrip(data)


def _lstrip(data: bytearray) -> bytes:
    return bytes(data).removeprefix(codecs.BOM_UTF8).lstrip()


def _rows_in_object(file: Path, names: Container[str]) -> list[Any]:
    data = bytearray()
    for block in blocks(file):
        data += block
        if len(data) > MAX_OBJECT_BYTES:
            raise Damaged(
                f"a JSON object of more than {MAX_OBJECT_BYTES >> 20} MB, which cannot be read row by row; "
                "save its list of rows as an array or as JSONL"
            )
    value = parse(bytes(data), 0)
    if isinstance(value, BadRow):
        raise Damaged(str(value))
    if not isinstance(value, dict):
        raise Damaged("found neither a JSON array nor an object of rows")
    if _is_row(value, names):
        return [value]
    tables = {name: rows for name, rows in value.items() if _is_table(rows)}
    if len(tables) != 1:
        fields = ", ".join(f"'{name}'" for name in (tables or value)) or "nothing"
        which = "several lists" if tables else "no list"
        raise Damaged(f"a JSON object with {which} of rows (found {fields}), expected an array, or one list of objects")
    return next(iter(tables.values()))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict | list)


def _is_row(value: Any, names: Container[str]) -> bool:
    return isinstance(value, dict) and any(name in names for name in value)


class _JSONStream:
    """Parses JSON values one by one and reads the file as needed."""

    def __init__(self, file: Path):
        self._blocks = blocks(file)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._read = self._dropped = 0  # bytes read, characters removed from the front of `_text`
        self._ended = False

    def array(self) -> Iterator[Any]:
        """The elements of the array at the current position; one with an unpaired surrogate is a `BadRow`."""
        self._expect("[")
        if self.peek() == "]":
            return
        while True:
            yield self._value()
            if self.peek() == "]":
                break
            self._expect(",")
        self._expect("]")
        if rest := self.peek():
            raise Damaged(f"malformed JSON: {rest!r} after the array, at character {self._position(self._at)}")

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            self._at = _skip_blanks(self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _expect(self, character: str) -> None:
        following = self.peek()
        if following != character:
            place = f"{following!r} at character {self._position(self._at)}" if following else "the end of the file"
            raise Damaged(f"malformed JSON: found {place}, expected '{character}'")
        self._at += 1

    def _value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                position = self._position(error.pos)
                if self._read_more():
                    continue
                raise Damaged(f"malformed JSON: {error.msg} at character {position}") from None
            except (ValueError, RecursionError) as error:
                raise Damaged(f"malformed JSON: {error}") from None
            complete = self._text[end : end + 1] in _AFTER or not isinstance(value, int | float)
            if not complete and self._read_more():
                continue  # a number may continue in the next block: "1", "1.", "1.5"
            has_surrogate = "\\ud" in self._text[self._at : end].lower()
            self._at = end
            return _reject_surrogates(value) if has_surrogate else value

    def _read_more(self) -> bool:
        """Double the buffered text, so that a long value is not parsed again for every block. False at the end."""
        buffered = self._text[self._at :]
        if len(buffered) > MAX_ROW_CHARACTERS:
            raise Damaged(
                f"a row of more than {MAX_ROW_CHARACTERS >> 20} million characters; check for an unclosed bracket"
            )
        texts, missing = [buffered], len(buffered) + 1
        while missing > 0 and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            texts.append(self._decode(block))
            missing -= len(texts[-1])
        self._dropped, self._text, self._at = self._dropped + self._at, "".join(texts), 0
        return len(self._text) > len(buffered)

    def _decode(self, block: bytes) -> str:
        undecoded = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            position = self._read - undecoded + error.start
            raise Damaged(f"byte {position} (0x{error.object[error.start]:02x}) is not UTF-8") from None
        self._read += len(block)
        return text

    def _position(self, at: int) -> int:
        """Position in the file, in characters from 1, of an index into `_text`."""
        return self._dropped + at + 1


def _skip_blanks(text: str, start: int) -> int:
    match = _BLANKS.match(text, start)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
