"""The bytes of each piece of a vocabulary, according to the decoder of its `tokenizer.json`.

The library's decoders take a complete sequence. Here each piece is decoded alone, so that the bytes of a sequence are
those of its parts; the one blank that only the first or the last piece of a text loses is removed by `decode`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, decoders

from ingot.core.errors import UserError
from ingot.tokenizer.hf_fields import flattened, prepends, suffix_as_blank

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEANUP = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""The replacements of the decoder `WordPiece` with `cleanup`, in the library's order."""

Step = Callable[[str], str | bytes]


def byte_letters() -> dict[int, str]:
    """GPT-2's byte alphabet: byte -> itself if printable Latin-1, else the next letter from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(others)}


LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class PieceDecoder:
    """Converts pieces to bytes.

    Args:
        data: the content of `tokenizer.json`.

    Raises:
        UserError: a decoder whose result depends on more than a piece.
    """

    def __init__(self, data: Mapping[str, Any]):
        model, parts = data["model"], flattened(data.get("decoder"), "decoder")
        self.leading_space = not parts
        """Decoding yields a blank before the text that is not part of it."""
        by_type = {part["type"]: part for part in parts}
        self._suffix = suffix_as_blank(data)
        self._steps: list[Step] = [] if parts else [_after_blank]
        fused = False
        for part in parts:
            fused = fused or part["type"] == "Fuse"
            if step := self._step(part, fused):
                self._steps.append(step)
        if model.get("byte_fallback") and "ByteFallback" not in by_type:
            self._steps.append(_byte_token)

    @property
    def trailing_space(self) -> bool:
        """Decoding yields a blank after the text that is not part of it."""
        return bool(self._suffix)

    def bytes_of(self, piece: str) -> bytes:
        ends_word = bool(self._suffix) and piece.endswith(self._suffix)
        value: str | bytes = piece.removesuffix(self._suffix) if ends_word else piece
        for step in self._steps:
            if isinstance(value, str):
                value = step(value)
        return (value.encode() if isinstance(value, str) else value) + b" " * ends_word

    def _step(self, part: Mapping[str, Any], fused: bool) -> Step | None:
        """The function of one decoder on a piece; `fused` if the library applies it to the complete text."""
        match part["type"]:
            case "ByteLevel":
                return _letters
            case "ByteFallback":
                return _byte_token
            case "Replace":
                return _replace(part, fused)
            case "Strip":
                return self._strip(part, fused)
            case "Metaspace":
                self.leading_space |= prepends(part)
                return lambda text: text.replace(part["replacement"], " ")
            case "WordPiece":
                return self._word_piece(part)
            case _:  # Fuse, and BPEDecoder, whose suffix `bytes_of` removes
                return None

    def _word_piece(self, part: Mapping[str, Any]) -> Step:
        self.leading_space = True

        def step(text: str) -> str:
            inside = bool(part["prefix"]) and text.startswith(part["prefix"])
            text = text.removeprefix(part["prefix"]) if inside else " " + text
            for old, new in _CLEANUP if part["cleanup"] else ():
                text = text.replace(old, new)
            return text

        return step

    def _strip(self, part: Mapping[str, Any], fused: bool) -> Step | None:
        content, start, stop = part["content"], part["start"], part["stop"]
        if fused and (content != " " or start > 1 or stop):
            raise UserError(
                f"tokenizer.json: decoder (Strip): found content {content!r}, start {start} and stop {stop} after "
                "Fuse, expected a blank, at most 1 and 0; text at its end would be lost"
            )
        if fused:
            self.leading_space |= start == 1
            return None

        def step(text: str) -> str:
            first = next((n for n in range(start) if text[n : n + 1] != content), start)
            last = next((n for n in range(stop) if text[len(text) - n - 1 : len(text) - n] != content), stop)
            return text[first : max(first, len(text) - last)]

        return step


def _after_blank(text: str) -> str:
    """Without a decoder, pieces are joined by blanks."""
    return " " + text


def _letters(text: str) -> str | bytes:
    return bytes(map(LETTER_BYTES.__getitem__, text)) if all(letter in LETTER_BYTES for letter in text) else text


def _byte_token(text: str) -> str | bytes:
    return bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(text)) else text


def _replace(part: Mapping[str, Any], fused: bool) -> Step:
    pattern, content = part["pattern"], part["content"]
    if "String" in pattern and (not fused or len(pattern["String"]) == 1):
        return lambda text: text.replace(pattern["String"], content)
    if fused:
        raise UserError(
            f"tokenizer.json: decoder (Replace): found {pattern} after Fuse, expected one character, because texts are "
            "decoded piece by piece; put Fuse last"
        )
    replace = decoders.Replace(Regex(pattern["Regex"]), content)
    return lambda text: replace.decode([text])
