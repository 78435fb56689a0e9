"""The wire format of protocol buffers, as far as SentencePiece's models need it (https://protobuf.dev/programming-guides/encoding).

A message is a list of fields: a key (number << 3 | wire type), then the value.
"""

import struct
from collections.abc import Iterable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
_SIZES = {FIXED64: 8, FIXED32: 4}

Message = dict[int, list[int | bytes]]
"""Number of a field -> its values in order; fixed-width numbers are their bytes."""


def parse(data: bytes) -> Message:
    """The fields of a message. Raises ValueError if the data are none, or end early."""
    message: Message = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: int | bytes
        if key & 7 == VARINT:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if key & 7 == BYTES else (_size(key), at)
            value, at = data[at : at + size], at + size
        if at > len(data) or not key >> 3:
            raise ValueError(f"a field ends at byte {at:,} of {len(data):,}")
        message.setdefault(key >> 3, []).append(value)
    return message


def integer(message: Message, number: int, default: int) -> int:
    """The last value of a field of type int32, bool or enum."""
    value = message.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no number")
    return value - (1 << 64) if value >> 63 == 1 else value


def content(message: Message, number: int, default: bytes = b"") -> bytes:
    """The last value of a field of type bytes, string or message."""
    value = message.get(number, [default])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number")
    return value


def real(message: Message, number: int) -> float:
    """The last value of a field of type float; 0 by default."""
    return struct.unpack("<f", content(message, number, b"\0\0\0\0"))[0]


def encode(fields: Iterable[tuple[int, int | float | bytes]]) -> bytes:
    """A message from (number, value): an int, a float (32 bits), or the bytes of a string or message."""
    out = bytearray()
    for number, value in fields:
        type = BYTES if isinstance(value, bytes) else FIXED32 if isinstance(value, float) else VARINT
        out += _encoded_varint(number << 3 | type)
        if isinstance(value, bytes):
            out += _encoded_varint(len(value)) + value
        else:
            out += struct.pack("<f", value) if isinstance(value, float) else _encoded_varint(value % (1 << 64))
    return bytes(out)


def _size(key: int) -> int:
    if key & 7 not in _SIZES:
        raise ValueError(f"found wire type {key & 7}")
    return _SIZES[key & 7]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position after it) of a number in groups of seven bits, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"a number ends at byte {at:,}")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"a number at byte {at:,} has more than 64 bits")


def _encoded_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
