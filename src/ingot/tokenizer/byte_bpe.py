"""The lossless tokenizers byte-level BPE and characters, and the reader of tokenizer files.

One JSON file and one fingerprint cover everything that determines the ids (type, pattern, tokens, special tokens, chat
template); stores and checkpoints record and compare the fingerprint. Text never produces a special token: a document
that contains `<|endoftext|>` is encoded as these letters, and only code that intends a special token (`eot`, the chat
renderer) writes its id. rustbpe trains the merges and tiktoken applies them.

Characters outside the alphabet are an error and not an unknown token, because that would hide the loss.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from ingot.core.artifact import regular
from ingot.core.errors import UserError
from ingot.tokenizer.base import FORMAT, VERSION, Tokenizer, random_placeholders
from ingot.tokenizer.hf_tokenizers import HFTokenizer
from ingot.tokenizer.settings import SPECIAL_TOKENS_MAP, SPECIALS, TURNS

CODE_POINTS = 0x110000


class ByteBPE(Tokenizer):
    """Byte-level BPE: tokens in merge order (the 256 bytes first), then the special tokens.

    Args:
        tokens: bytes of every ordinary token; the position is the id.
        pattern: pre-tokenisation regular expression.
        template: chat format.
    """

    kind = "byte-bpe"

    special_tokens_map: Mapping[str, str] = SPECIAL_TOKENS_MAP

    def __init__(self, tokens: Sequence[bytes], pattern: str, template: str = TURNS):
        self.tokens, self.pattern, self.template = list(tokens), pattern, template
        self.specials = {name: len(self.tokens) + n for n, name in enumerate(SPECIALS)}
        self.vocab = len(self.tokens) + len(self.specials)
        self.placeholders = random_placeholders(self.specials)
        self.lengths = np.array([len(t) for t in self.tokens] + [0] * len(self.specials), dtype=np.int64)
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self._encoding = tiktoken.Encoding(
            "ingot", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.specials, explicit_n_vocab=self.vocab
        )

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except UnicodeEncodeError as error:
            raise UserError(f"text to encode: {error.reason} at position {error.start}; give valid Unicode") from None
        except ValueError as error:
            raise UserError(f"tokenizer pattern {self.pattern!r}: {error}; bound its repetitions") from None
        return np.asarray(ids, dtype=np.uint32)

    def encode_with_specials(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        ids_of = {placeholder: self.specials[name] for name, placeholder in self.placeholders.items()}
        separator = re.compile("(" + "|".join(ids_of) + ")")

        def encode_one(text: str) -> tuple[np.ndarray, np.ndarray]:
            ids, spans, at = [np.empty(0, np.uint32)], [np.empty((0, 2), np.int64)], 0
            for piece in separator.split(text):
                if piece in ids_of:
                    ids.append(np.array([ids_of[piece]], np.uint32))
                    spans.append(np.array([[at, at + len(piece)]]))
                else:
                    ids.append(self.encode(piece))
                    spans.append(at + self._spans(piece, ids[-1]))
                at += len(piece)
            return np.concatenate(ids), np.concatenate(spans)

        return [encode_one(text) for text in texts]

    def _spans(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Span [n, 2] of each id in the characters of `text`; a character that is cut belongs to all of its ids."""
        char_starts = np.flatnonzero((np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80)
        ends = np.cumsum(self.lengths[ids])
        starts = np.searchsorted(char_starts, ends - self.lengths[ids], side="right") - 1
        return np.stack((starts, np.searchsorted(char_starts, ends)), axis=1)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return self._encoding.decode_bytes(np.asarray(ids).tolist())

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(int(token))

    def definition(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "pattern": self.pattern,
            **self.chat_format,
            "specials": list(self.specials),
            "tokens": [token.hex() for token in self.tokens],
        }


class Char(Tokenizer):
    """One id per character.

    Args:
        alphabet: the characters; the id is the position in code point order. None: the id is the code point.
    """

    kind = "char"

    def __init__(self, alphabet: str | None):
        self.specials = {}
        points = np.arange(CODE_POINTS) if alphabet is None else np.array(sorted({ord(c) for c in alphabet}))
        self.alphabet = None if alphabet is None else "".join(map(chr, points))
        self.vocab = len(points)
        self._points = points.astype("<u4")
        self.lengths = (1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)).astype(np.int64)
        self._ids = np.full(CODE_POINTS, -1, dtype=np.int32)
        self._ids[points] = np.arange(len(points))

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")]
        unseen = np.flatnonzero(ids < 0)
        if len(unseen):
            at = int(unseen[0])
            raise UserError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not one of the {self.vocab} "
                'characters of the train text; remove it, or use alphabet = "unicode" or type = "byte-bpe"'
            )
        return ids.astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        points = self._points[np.asarray(ids, dtype=np.int64)]
        return points.tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")

    def definition(self) -> dict[str, Any]:
        return {"type": self.kind, "alphabet": self.alphabet}


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file.

    Raises:
        UserError: the file is missing, is no tokenizer, has another version, or was changed.
    """
    regular(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer; run the tokenizer stage first") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a tokenizer file ({error}); run the tokenizer stage again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        actual = f"{data.get('format')} {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise UserError(f"{path}: found {actual}, expected {FORMAT} {VERSION}; run the tokenizer stage again")
    try:
        tokenizer = _from_json(data)
        tokenizer.template_variables = data.get("template_variables", {})
    except KeyError as error:
        raise UserError(
            f"{path}: found type {data.get('type')!r} without {error}, expected both; run the tokenizer stage again"
        ) from None
    if tokenizer.fingerprint != (recorded := data.get("fingerprint")):
        raise UserError(
            f"{path}: found fingerprint {tokenizer.fingerprint}, expected {recorded}: the file was changed; run the "
            "tokenizer stage again"
        )
    return tokenizer


def _from_json(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer with this `definition`. Raises KeyError if an entry is missing."""
    if data["type"] == Char.kind:
        return Char(data["alphabet"])
    if data["type"] == ByteBPE.kind:
        return ByteBPE([bytes.fromhex(t) for t in data["tokens"]], data["pattern"], data["template"])
    return HFTokenizer(data["type"], data["library"], data["names"], data["template"], data["stops"])
