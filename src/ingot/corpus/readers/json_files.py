"""Reads rows from JSON: one per line (JSONL), or the values of one file, parsed while the file is read.

A `.json` file can be an array of rows, an object with one such list among other fields, objects one after another, one
row, or configuration, which holds no rows. `scan` decides; anything else is refused by what it looks like. Nothing is
parsed at once, because exports of 10 GB are common.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ingot.core.errors import shortened
from ingot.corpus.readers.fields import has_text, is_empty
from ingot.corpus.readers.files import BadRow, Row, TextFile, not_utf8, row_too_long
from ingot.corpus.readers.packing import Damaged

_BLANKS = re.compile(r"[ \t\n\r]*")
_AFTER = tuple(",] \t\n\r}")


class RepeatedName(BadRow):
    """An object has a name twice; a decoder of Python keeps the last value and drops the others."""


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        name = next(name for name, times in Counter(name for name, _ in members).items() if times > 1)
        raise RepeatedName(f"names '{shortened(name)}' twice, expected each name once in an object; remove one")
    return found


_DECODER = json.JSONDecoder()
_ROW_DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""Raises RepeatedName; costs 3 % of the time to read a row."""


class Layout(NamedTuple):
    """Where the rows of a JSON file are."""

    kind: Literal["array", "table", "values", "configuration"]
    """The elements of the top-level array; those of one list in an object; the top-level values; nowhere."""
    field: str = ""
    """The name of the list in the object."""
    others: Mapping[str, bool] = {}
    """The first members beside the list that are not empty -> whether they hold text. They are not read."""


def jsonl_rows(file: TextFile) -> Iterator[Row]:
    """One row per non-blank line. Raises Damaged."""
    for line in file.lines():
        if line.too_long:
            yield Row(BadRow(row_too_long(file.max_bytes, line.size)), line.offset, line.number, bytes=line.size)
        elif line.data.strip():
            yield Row(parse(line.data, line.offset), line.offset, line.number, bytes=line.size)


def scan(file: TextFile, names: Collection[str]) -> Layout:
    """Where the rows of a JSON file are.

    Args:
        file: the file; of an object all of it is read.
        names: field names of which every row has at least one.

    Raises:
        Damaged: not valid JSON, or an object that looks like rows in an arrangement that is not known.
    """
    stream = _JSONStream(file, _DECODER)
    if stream.peek() == "[":
        return Layout("array")
    if stream.peek() != "{":
        raise Damaged("found neither a JSON array nor an object of rows")
    shape = _Shape()
    try:
        for name in stream.members():
            if name in names:
                return Layout("values")
            shape.add(name, stream)
        following = stream.peek()
    except Damaged:
        if len(shape.tables) == 1:  # its complete rows are read before the damage
            return Layout("table", shape.tables[0], shape.others)
        raise
    if following == "{":
        return Layout("values")
    if following:
        raise Damaged(stream.unexpected("after the object"))
    return shape.layout()


def json_rows(file: TextFile, layout: Layout) -> Iterator[Row]:
    """The rows of a file that is not configuration. Raises Damaged."""
    stream = _JSONStream(file)
    if layout.kind == "array":
        values = stream.array()
    elif layout.kind == "table":
        values = stream.member(layout.field)
    else:
        values = stream.values()
    for number, value in enumerate(values):
        yield Row(value, number, row=number + 1)


def parse(data: bytes, offset: int) -> Any:
    """The value of a JSON line, or a `BadRow`. `offset` is the byte of the line in its file."""
    try:
        value = _ROW_DECODER.decode(data.removeprefix(codecs.BOM_UTF8).decode())  # joined files have one in each part
    except RepeatedName as error:
        return error
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(f"byte {offset + error.start}", error))
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        return BadRow(f"malformed JSON: {_TOO_DEEP}")
    except ValueError as error:
        return BadRow(f"malformed JSON: {error}")
    return _reject_surrogates(value) if b"\\ud" in data or b"\\uD" in data else value


_TOO_DEEP = "nested too deeply, which no row of a data set is"


def _reject_surrogates(value: Any) -> Any:
    """Replace a value with an unpaired surrogate by a `BadRow`: json.loads accepts one, but UTF-8 cannot encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow("found an unpaired surrogate (\\ud800 to \\udfff), which is no character")
    except RecursionError:
        return BadRow(f"malformed JSON: {_TOO_DEEP}")
    return value


_MAX_OTHERS = 1000


class _Shape:
    """What is in a JSON object, in little memory: it may have a million members."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        """Names of the lists of objects or of lists."""
        self.others: dict[str, bool] = {}
        """As in `Layout`."""
        self._names: list[str] = []
        self._members = 0
        self._nested = ""
        self._pandas = False
        self._objects = 0
        self._common: set[str] = set()  # names that all objects share
        self._lists: set[int] = set()
        self._others = self._numbered = False
        self._numbers = True  # whether all members have numbers as names

    def add(self, name: str, stream: "_JSONStream") -> None:
        """Read the value of a member."""
        self._members += 1
        self._numbers &= name.isdigit()
        self._names += [name] if len(self._names) < 8 else []
        if stream.peek() != "[":
            self._add_value(name, value := stream.value())
            self._add_other(name, value)
            return
        length = 0
        for value in stream.elements():
            if length == 0 and isinstance(value, dict | list):
                self.tables.append(name)
                self._pandas = "columns" in self._names and isinstance(value, list)
            if name not in self.tables:
                self._add_other(name, value)
            length += 1
        self._lists |= {length} if len(self._lists) < 2 else set()

    def _add_value(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            self._common = self._common & {*value} if self._objects else {*value}
            self._objects += 1
            self._numbered = all(key.isdigit() for key in value)
            self._nested = self._nested or (name if _has_rows(value) else "")
        else:
            self._others = True

    def _add_other(self, name: str, value: Any) -> None:
        if len(self.others) < _MAX_OTHERS and not self.others.get(name) and not is_empty(value):
            self.others[name] = has_text(value)

    def layout(self) -> Layout:
        """Where the rows are. Raises Damaged."""
        if len(self.tables) > 1 or self._pandas:
            raise Damaged(f"a JSON object with several lists of rows ({self.names()}), {_EXPECTED}")
        if self.tables:
            return Layout("table", self.tables[0], self.others)
        if self._nested:
            raise Damaged(f"a JSON object with rows inside '{self._nested}', {_EXPECTED}")
        if self._members == 1 and self._objects and not self._numbered:
            return Layout("configuration")  # with one section
        alike = bool(self._common) if self._objects else len({length for length in self._lists if length > 1}) == 1
        by_column = alike and not self._others and not (self._objects and self._lists)
        if by_column or (self._numbers and self._members > 1):
            raise Damaged(f"a JSON object that looks like a table by columns or index ({self.names()}), {_EXPECTED}")
        return Layout("configuration")

    def names(self) -> str:
        """The names of the lists of rows, or of all members, for a message."""
        return "found " + (", ".join(f"'{shortened(name)}'" for name in (self.tables or self._names)[:8]) or "nothing")


_EXPECTED = 'expected an array, or one list of objects (pandas: orient = "records")'


def _has_rows(value: Any) -> bool:
    """Whether there is a list of objects anywhere in a value."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list) and one and isinstance(one[0], dict):
            return True
        if isinstance(one, dict | list):
            pending += one.values() if isinstance(one, dict) else one
    return False


class _JSONStream:
    """Parses JSON values one by one and reads the file as needed."""

    def __init__(self, file: TextFile, decoder: json.JSONDecoder = _ROW_DECODER):
        self._file, self._blocks, self._values = file, file.blocks(), decoder
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._read = self._dropped = 0  # bytes read, characters removed from the front of `_text`
        self._ended = False
        self._damage: Damaged | None = None  # raised when all text before it is parsed

    def array(self) -> Iterator[Any]:
        """The elements of the array that is the complete file."""
        yield from self.elements()
        if self.peek():
            raise Damaged(self.unexpected("after the array"))

    def values(self) -> Iterator[Any]:
        """The values of a file, one after another."""
        while self.peek():
            yield self.value()

    def member(self, field: str) -> Iterator[Any]:
        """The elements of the list `field` of the object that is the complete file."""
        for name in self.members():
            elements = self.elements() if self.peek() == "[" else iter((self.value(),))
            for value in elements:
                if name == field:
                    yield value

    def elements(self) -> Iterator[Any]:
        """The elements of the array at the current position; one with an unpaired surrogate is a `BadRow`."""
        self._expect("[")
        if self.peek() != "]":
            yield self.value()
            while self.peek() != "]":
                self._expect(",")
                yield self.value()
        self._expect("]")

    def members(self) -> Iterator[str]:
        """The names of the object at the current position; the caller reads each value."""
        self._expect("{")
        following = self.peek()
        while following != "}":
            if self.peek() != '"':
                self._expect('"')
            name = self.value()
            self._expect(":")
            yield str(name)
            following = self.peek()
            if following != "}":
                self._expect(",")
        self._expect("}")

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            self._at = _skip_blanks(self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def unexpected(self, where: str) -> str:
        """The message for the next character."""
        return f"malformed JSON: {self.peek()!r} {where}, at character {self._position(self._at)}"

    def _expect(self, character: str) -> None:
        following = self.peek()
        if following != character:
            place = f"{following!r} at character {self._position(self._at)}" if following else "the end of the file"
            raise Damaged(f"malformed JSON: found {place}, expected '{character}'")
        self._at += 1

    def value(self) -> Any:
        """The value at the current position."""
        self.peek()
        while True:
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                position = self._position(error.pos)
                if self._read_more():
                    continue
                raise Damaged(f"malformed JSON: {error.msg} at character {position}") from None
            except RecursionError:
                raise Damaged(f"malformed JSON: {_TOO_DEEP}") from None
            except ValueError as error:
                raise Damaged(f"malformed JSON: {error}") from None
            complete = self._text[end : end + 1] in _AFTER or not isinstance(value, int | float)
            if not complete and self._read_more():
                continue  # a number may continue in the next block: "1", "1.", "1.5"
            has_surrogate = "\\ud" in self._text[self._at : end].lower()
            self._at = end
            return _reject_surrogates(value) if has_surrogate else value

    def _decoded(self) -> tuple[Any, int]:
        """The value at the current position of the buffer, and the index after it."""
        try:
            return self._values.raw_decode(self._text, self._at)
        except RepeatedName as error:
            return error, _DECODER.raw_decode(self._text, self._at)[1]

    def _read_more(self) -> bool:
        """Double the buffered text, so that a long value is not parsed again for every block. False at the end."""
        buffered = self._text[self._at :]
        if len(buffered) > self._file.max_bytes:
            raise Damaged(f"a row at character {self._position(self._at)}: {row_too_long(self._file.max_bytes)}")
        if self._damage:
            raise self._damage
        texts, missing = [buffered], len(buffered) + 1
        while missing > 0 and not self._ended:
            texts.append(self._next_text())
            missing -= len(texts[-1])
        self._dropped, self._text, self._at = self._dropped + self._at, "".join(texts), 0
        if self._damage and len(self._text) == len(buffered):
            raise self._damage
        return len(self._text) > len(buffered)

    def _next_text(self) -> str:
        undecoded = len(self._decoder.getstate()[0])
        try:
            block = next(self._blocks, b"")
            self._ended = not block
            text = self._decoder.decode(block, final=self._ended)
            self._read += len(block)
            return text
        except UnicodeDecodeError as error:
            position = self._read - undecoded + error.start
            self._damage = Damaged(not_utf8(f"byte {position:,}", error))
            self._ended = True
            return error.object[: error.start].decode("utf-8-sig" if position == error.start else "utf-8")
        except Damaged as error:
            self._damage, self._ended = error, True
            return ""

    def _position(self, at: int) -> int:
        """Position in the file, in characters from 1, of an index into `_text`."""
        return self._dropped + at + 1


def _skip_blanks(text: str, start: int) -> int:
    match = _BLANKS.match(text, start)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
