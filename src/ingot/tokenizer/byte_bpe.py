"""Text to ids and back, losslessly or with an error: byte-level BPE and characters.

A tokenizer is a value: everything that determines its ids (type, pattern, tokens, special tokens, chat template) is in
one JSON file and in one fingerprint, which stores and checkpoints record and compare. Special tokens are never made
from text: a document that contains the letters `<|endoftext|>` is encoded as those letters, and only code that means a
special token (`eot`, the chat renderer) writes its id. rustbpe trains merges and tiktoken applies them, each the
fastest at its half.

Rejected: pickle (a file that runs code), an unknown token for characters (it hides what it replaced), and parsing
special tokens out of text with an escape hatch (every caller must then remember the hatch).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from ingot.core.errors import UserError
from ingot.tokenizer.base import FORMAT, VERSION, Tokenizer, unguessable
from ingot.tokenizer.hf_tokenizers import LibraryTokenizer
from ingot.tokenizer.settings import ROLES_OF_SPECIALS, SPECIALS, TURNS

CODE_POINTS = 0x110000


class ByteBPE(Tokenizer):
    """Byte-level BPE: tokens in merge order (the 256 bytes first), then the special block at the end.

    Args:
        tokens: bytes of every ordinary token; the position is the id.
        pattern: pre-tokenisation regular expression.
        template: name of the chat format.
    """

    kind = "byte-bpe"

    names: Mapping[str, str] = ROLES_OF_SPECIALS

    def __init__(self, tokens: Sequence[bytes], pattern: str, template: str = TURNS):
        self.tokens, self.pattern, self.template = list(tokens), pattern, template
        self.specials = {name: len(self.tokens) + n for n, name in enumerate(SPECIALS)}
        self.vocab = len(self.tokens) + len(self.specials)
        self.marks = unguessable(self.specials)
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

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        ids_of = {mark: self.specials[name] for name, mark in self.marks.items()}
        border = re.compile("(" + "|".join(ids_of) + ")")

        def one(text: str) -> tuple[np.ndarray, np.ndarray]:
            ids, spans, at = [np.empty(0, np.uint32)], [np.empty((0, 2), np.int64)], 0
            for piece in border.split(text):
                if piece in ids_of:
                    ids.append(np.array([ids_of[piece]], np.uint32))
                    spans.append(np.array([[at, at + len(piece)]]))
                else:
                    ids.append(self.encode(piece))
                    spans.append(at + self._spans(piece, ids[-1]))
                at += len(piece)
            return np.concatenate(ids), np.concatenate(spans)

        return [one(text) for text in texts]

    def _spans(self, text: str, ids: np.ndarray) -> np.ndarray:
        """[n, 2]: the characters of `text` that each of its ids spells, or spells a part of."""
        firsts = np.flatnonzero((np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80)  # byte where each one begins
        ends = np.cumsum(self.lengths[ids])
        starts = np.searchsorted(firsts, ends - self.lengths[ids], side="right") - 1
        return np.stack((starts, np.searchsorted(firsts, ends)), axis=1)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return self._encoding.decode_bytes(np.asarray(ids).tolist())

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(int(token))

    def definition(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "pattern": self.pattern,
            "template": self.template,
            "specials": list(self.specials),
            "tokens": [token.hex() for token in self.tokens],
        }


class Char(Tokenizer):
    """One id a character.

    Args:
        alphabet: the characters, id = position in code point order; None: the id is the code point.
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
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at}: not among the {self.vocab} "
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
        UserError: missing, not a tokenizer, of another version, or changed since it was written.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer; run the tokenizer stage first") from None
    except ValueError as error:
        raise UserError(f"{path}: not a tokenizer file ({error}); run the tokenizer stage again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        found = f"{data.get('format')} {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise UserError(f"{path}: found {found}, expected {FORMAT} {VERSION}; run the tokenizer stage again")
    try:
        tokenizer = _restored(data)
    except KeyError as error:
        raise UserError(
            f"{path}: found type {data.get('type')!r} without {error}, expected both; run the tokenizer stage again"
        ) from None
    if tokenizer.fingerprint != (recorded := data.get("fingerprint")):
        raise UserError(
            f"{path}: the content's fingerprint is {tokenizer.fingerprint}, the recorded one {recorded}: "
            "the file was changed; run the tokenizer stage again"
        )
    return tokenizer


def _restored(data: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer from its file's table. Raises KeyError: one of its parts is missing."""
    if data["type"] == Char.kind:
        return Char(data["alphabet"])
    if data["type"] == ByteBPE.kind:
        return ByteBPE([bytes.fromhex(t) for t in data["tokens"]], data["pattern"], data["template"])
    return LibraryTokenizer(data["type"], data["library"], data["names"], data["template"], data["stops"])
