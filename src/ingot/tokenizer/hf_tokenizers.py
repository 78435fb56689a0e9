"""Tokenizers that the `tokenizers` library runs: words, WordPiece, Unigram, SentencePiece's BPE, and vocabulary files.

The definition is a `tokenizer.json` of that library, kept as plain data, so what we train can be exported as it is and
what others trained behaves here as it does there. Two things differ from the library's own habits. Special tokens are
never made from text: while the library runs, they have names that nobody can guess (also in the vocabulary, where
Unigram would find `</s>` like any other piece), and only code that means a token writes its name. And ids are decoded
by a table of the bytes of each, so that any part of a sequence can be decoded and half a character stays half.

Rejected: the library's own `decode` (it joins with spaces, drops a first space and cannot say which bytes an id is),
and `transformers` (a second framework to load the same file).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer, unguessable

METASPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_letters() -> dict[int, str]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, other bytes for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(hidden)}


LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        kind: the type's name.
        data: its `tokenizer.json`; truncation and padding are left out.
        names: what its special tokens are for.
        template: chat format.
        stops: ids that end an answer besides `eot`.

    Raises:
        UserError: the library cannot read `data`.
    """

    def __init__(
        self,
        kind: str,
        data: dict[str, Any],
        names: Mapping[str, str] | None = None,
        template: str = "",
        stops: Sequence[int] = (),
    ):
        self.kind, self.template, self.stops = kind, template, tuple(stops)
        self.names: Mapping[str, str] = dict(names or {})
        self.data = {**data, "truncation": None, "padding": None}
        added = self.data.get("added_tokens") or []
        marked = {token["content"] for token in added if token.get("special")}
        ids = ids_of(self.data)
        self.vocab = max(ids.values(), default=-1) + 1
        self.specials = {name: ids[name] for name in sorted(marked, key=lambda name: (ids[name], name))}
        self.marks = unguessable(self.specials)
        self._library = read_library(_renamed(self.data, self.marks))
        _check_ids(ids, self.marks, self._library)
        self.lossless = _is_lossless(self.data, ids)
        self.unknown = None if self.lossless else _unknown(self.data["model"], ids)
        spelling = _Spelling.of(self.data)
        self._leading_space = spelling.leading_space
        self._bytes = spelling.table(ids, {token["content"] for token in added}, self.vocab)
        self.lengths = np.array([len(b) for b in self._bytes], dtype=np.int64)
        self.lengths[list(self.specials.values())] = 0
        if self.unknown is not None:
            self.lengths[self.unknown] = 0

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of every text; the library brings its own threads."""
        return [np.array(e.ids, dtype=np.uint32) for e in _encode(self._library, texts, fast=True)]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = _encode(self._library, texts, fast=False)
        marks = {id: self.marks[name] for name, id in self.specials.items()}
        found = []
        for encoding, text in zip(encodings, texts, strict=True):
            ids, spans = np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for n in np.flatnonzero(np.isin(ids, list(marks))):
                mark = marks[int(ids[n])]
                start = text.find(mark, *spans[n])
                if start >= 0:  # some take blanks beside them along, and the unknown one stands for other signs
                    spans[n] = start, start + len(mark)
            found.append((ids, spans))
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        text = super().decode(ids)
        return text[1:] if self._leading_space and text.startswith(" ") else text

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return b"".join(map(self._bytes.__getitem__, np.asarray(ids).tolist()))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[int(token)]

    def definition(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "names": dict(self.names),
            "template": self.template,
            "stops": list(self.stops),
            "library": self.data,
        }


def added_tokens(specials: Mapping[str, int]) -> list[dict[str, Any]]:
    """Special tokens as `tokenizer.json` lists them, by id."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": id, "content": name, **plain} for name, id in sorted(specials.items(), key=lambda item: item[1])]


def ids_of(data: dict[str, Any]) -> dict[str, int]:
    """Piece -> id of a `tokenizer.json`, added tokens included."""
    vocab = data["model"]["vocab"]
    own = {piece: n for n, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return own | {token["content"]: token["id"] for token in data.get("added_tokens") or []}


def _check_ids(ids: Mapping[str, int], marks: Mapping[str, str], library: Library) -> None:
    """The library numbers added tokens anew: in a file with holes they would not be the ids that the file says."""
    found = library.get_vocab()
    for piece, id in ids.items():
        if found[marks.get(piece, piece)] != id:
            raise UserError(
                f"tokenizer.json: token {piece!r} has id {id}, expected {found[marks.get(piece, piece)]} (added tokens "
                "are numbered without holes, after the vocabulary); correct its ids"
            )


def read_library(data: dict[str, Any]) -> Library:
    """The library's tokenizer of plain data; raises UserError where it cannot be read."""
    try:
        return Library.from_str(json.dumps(data, ensure_ascii=False))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"tokenizer.json: the tokenizers library cannot read it ({error})") from None


def library_data(library: Library) -> dict[str, Any]:
    """A library's tokenizer as plain data."""
    return json.loads(library.to_str())


def _encode(library: Library, texts: Sequence[str], fast: bool) -> list[Any]:
    encode = library.encode_batch_fast if fast else library.encode_batch
    try:
        return encode(list(texts), add_special_tokens=False)
    except TypeError:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"text to encode: {error.reason} at position {error.start}; give valid Unicode"
                ) from None
        raise
    except Exception as error:  # the library raises nothing narrower: a word that a vocabulary without unknown lacks
        raise UserError(f"text to encode: the vocabulary cannot spell it ({error})") from None


def _renamed(data: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy in which special tokens have other names, no merge makes one, and nothing is put around a text."""
    model, vocab = dict(data["model"]), data["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"])
        model["merges"] = [pair for pair in pairs if not any(part in names for part in (*pair, "".join(pair)))]
    added = [{**t, "content": names.get(t["content"], t["content"])} for t in data.get("added_tokens") or []]
    return {**data, "model": model, "added_tokens": added, "post_processor": None}


def _unknown(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    if model["type"] == "Unigram":
        return None if model.get("byte_fallback") else model.get("unk_id")
    return None if model.get("byte_fallback") or not model.get("unk_token") else ids.get(model["unk_token"])


def _is_lossless(data: dict[str, Any], ids: Mapping[str, int]) -> bool:
    """Whether every text comes back to the byte: nothing is normalised away, no token takes blanks beside it
    along, and every byte has an id."""
    splits = _parts(data.get("pre_tokenizer"), "pretokenizers")
    whole = all(p["type"] in ("Split", "Digits", "ByteLevel") and p.get("behavior") != "Removed" for p in splits)
    unprefixed = not any(p.get("add_prefix_space") for p in splits)
    if any(p["type"] == "ByteLevel" for p in splits):
        forms = {"", data["model"].get("continuing_subword_prefix") or ""}
        bytes_known = all(form + letter in ids for letter in LETTER_BYTES for form in forms)
    else:
        bytes_known = bool(data["model"].get("byte_fallback")) and all(f"<0x{b:02X}>" in ids for b in range(256))
    blanks = any(t.get("lstrip") or t.get("rstrip") for t in data.get("added_tokens") or [] if not t.get("special"))
    return data.get("normalizer") is None and whole and unprefixed and bytes_known and not blanks


@dataclass(frozen=True)
class _Spelling:
    """How pieces of a vocabulary become bytes, as its decoders say."""

    byte_level: bool
    byte_tokens: bool
    metaspace: bool
    words: bool
    """Pieces are words without their spaces."""
    continuing: str
    """What marks a piece that goes on with a word."""
    leading_space: bool
    """A whole text begins with a space that was not there."""

    @classmethod
    def of(cls, data: dict[str, Any]) -> "_Spelling":
        model = data["model"]
        decoders = {d["type"]: d for d in _parts(data.get("decoder"), "decoders")}
        byte_level = "ByteLevel" in decoders
        words = (model["type"] == "WordPiece" and not byte_level) or (model["type"] == "WordLevel" and not decoders)
        stripped = bool(decoders.get("Strip", {}).get("start"))
        prefixed = decoders.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return cls(
            byte_level=byte_level,
            byte_tokens="ByteFallback" in decoders or bool(model.get("byte_fallback")),
            metaspace=METASPACE in str(data.get("decoder")),
            words=words,
            continuing=model["continuing_subword_prefix"] if model["type"] == "WordPiece" else "",
            leading_space=words or stripped or prefixed,
        )

    def table(self, ids: Mapping[str, int], added: set[str], vocab: int) -> list[bytes]:
        """The bytes of every id; empty for an id that has no piece."""
        table = [b""] * vocab
        for piece, id in ids.items():
            table[id] = piece.encode() if piece in added else self._bytes(piece)
        return table

    def _bytes(self, piece: str) -> bytes:
        inner = bool(self.continuing) and piece.startswith(self.continuing)
        text = piece.removeprefix(self.continuing)
        if self.byte_level and all(letter in LETTER_BYTES for letter in text):
            return bytes(LETTER_BYTES[letter] for letter in text)
        if self.byte_tokens and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        text = text.replace(METASPACE, " ") if self.metaspace else text
        return (" " + text if self.words and not inner else text).encode()


def _parts(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A component's members in order, sequences unfolded."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for member in component[key] for part in _parts(member, key)]
