"""Tokenizers of the Hugging Face `tokenizers` library: word, WordPiece, Unigram, SentencePiece BPE, imported files.

The definition is the library's `tokenizer.json` as JSON data, so a trained tokenizer is exported unchanged and an
imported one encodes as in the library, with two differences. Text never produces special tokens: inside the library
they have random placeholder names (also in the vocabulary, where Unigram would match `</s>` like any other piece). And
ids are decoded by a table of bytes, because the library's `decode` inserts and drops spaces and cannot decode half a
character.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer, random_placeholders

METASPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_letters() -> dict[int, str]:
    """GPT-2's byte alphabet: byte -> itself if printable Latin-1, else the next letter from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(others)}


LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class HFTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        kind: the type in the settings.
        data: the content of `tokenizer.json`; truncation and padding are removed.
        special_tokens_map: `eos_token` and so on -> special token.
        template: chat format.
        stops: ids that end an answer, in addition to `eot`.

    Raises:
        UserError: the library cannot read `data`.
    """

    def __init__(
        self,
        kind: str,
        data: dict[str, Any],
        special_tokens_map: Mapping[str, str] | None = None,
        template: str = "",
        stops: Sequence[int] = (),
    ):
        self.kind, self.template, self.stops = kind, template, tuple(stops)
        self.special_tokens_map: Mapping[str, str] = dict(special_tokens_map or {})
        self.data = {**data, "truncation": None, "padding": None}
        added = self.data.get("added_tokens") or []
        special = {token["content"] for token in added if token.get("special")}
        ids = ids_of(self.data)
        self.vocab = max(ids.values(), default=-1) + 1
        self.specials = {name: ids[name] for name in sorted(special, key=lambda name: (ids[name], name))}
        self.placeholders = random_placeholders(self.specials)
        self._backend = load_backend(_with_placeholders(self.data, self.placeholders))
        _check_ids(ids, self.placeholders, self._backend)
        self.lossless = _is_lossless(self.data, ids)
        self.unknown = None if self.lossless else _unknown(self.data["model"], ids)
        decoder = _PieceDecoder.of(self.data)
        self._leading_space = decoder.leading_space
        self._bytes = decoder.table(ids, {token["content"] for token in added}, self.vocab)
        self.lengths = np.array([len(b) for b in self._bytes], dtype=np.int64)
        self.lengths[list(self.specials.values())] = 0
        if self.unknown is not None:
            self.lengths[self.unknown] = 0

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of each text; the library uses its own threads."""
        return [np.array(e.ids, dtype=np.uint32) for e in _encode(self._backend, texts, fast=True)]

    def encode_with_specials(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = _encode(self._backend, texts, fast=False)
        placeholders = {id: self.placeholders[name] for name, id in self.specials.items()}
        encoded = []
        for encoding, text in zip(encodings, texts, strict=True):
            ids, spans = np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for n in np.flatnonzero(np.isin(ids, list(placeholders))):
                placeholder = placeholders[int(ids[n])]
                start = text.find(placeholder, *spans[n])
                if start >= 0:  # some special tokens absorb adjacent blanks; the unknown token covers other text
                    spans[n] = start, start + len(placeholder)
            encoded.append((ids, spans))
        return encoded

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
            "names": dict(self.special_tokens_map),
            "template": self.template,
            "stops": list(self.stops),
            "library": self.data,
        }


def added_tokens(specials: Mapping[str, int]) -> list[dict[str, Any]]:
    """The entries of `added_tokens` in `tokenizer.json` for special tokens, sorted by id."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": id, "content": name, **plain} for name, id in sorted(specials.items(), key=lambda item: item[1])]


def ids_of(data: dict[str, Any]) -> dict[str, int]:
    """Piece -> id of a `tokenizer.json`, including added tokens."""
    vocab = data["model"]["vocab"]
    ids = {piece: n for n, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return ids | {token["content"]: token["id"] for token in data.get("added_tokens") or []}


def _check_ids(ids: Mapping[str, int], placeholders: Mapping[str, str], backend: Backend) -> None:
    """Raise UserError if the library's ids differ from the file's: it renumbers added tokens that leave gaps."""
    backend_ids = backend.get_vocab()
    for piece, id in ids.items():
        expected = backend_ids[placeholders.get(piece, piece)]
        if expected != id:
            raise UserError(
                f"tokenizer.json: token {piece!r} has id {id}, expected {expected} (ids of added tokens follow the "
                "vocabulary without gaps); correct its ids"
            )


def load_backend(data: dict[str, Any]) -> Backend:
    """The library's tokenizer of a `tokenizer.json`. Raises UserError if the library cannot read it."""
    try:
        return Backend.from_str(json.dumps(data, ensure_ascii=False))
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"tokenizer.json: the tokenizers library cannot read it ({error})") from None


def backend_data(backend: Backend) -> dict[str, Any]:
    """The `tokenizer.json` of a library's tokenizer."""
    return json.loads(backend.to_str())


def _encode(backend: Backend, texts: Sequence[str], fast: bool) -> list[Any]:
    encode = backend.encode_batch_fast if fast else backend.encode_batch
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
    except Exception as error:  # the library raises no narrower type for a word outside a vocabulary without <unk>
        raise UserError(f"text to encode: the vocabulary cannot encode it ({error})") from None


def _with_placeholders(data: dict[str, Any], placeholders: Mapping[str, str]) -> dict[str, Any]:
    """A copy with special tokens renamed to placeholders, without merges into one, and without a post-processor."""
    model, vocab = dict(data["model"]), data["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[placeholders.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {placeholders.get(piece, piece): id for piece, id in vocab.items()}
    if "unk_token" in model:
        model["unk_token"] = placeholders.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"])
        model["merges"] = [pair for pair in pairs if not any(p in placeholders for p in (*pair, "".join(pair)))]
    added = [
        {**token, "content": placeholders.get(token["content"], token["content"])}
        for token in data.get("added_tokens") or []
    ]
    return {**data, "model": model, "added_tokens": added, "post_processor": None}


def _unknown(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    if model["type"] == "Unigram":
        return None if model.get("byte_fallback") else model.get("unk_id")
    return None if model.get("byte_fallback") or not model.get("unk_token") else ids.get(model["unk_token"])


def _is_lossless(data: dict[str, Any], ids: Mapping[str, int]) -> bool:
    """Whether decoding restores every text: no normaliser, no token that strips blanks, and an id for every byte."""
    splits = _flatten(data.get("pre_tokenizer"), "pretokenizers")
    keeps_text = all(p["type"] in ("Split", "Digits", "ByteLevel") and p.get("behavior") != "Removed" for p in splits)
    adds_space = any(p.get("add_prefix_space") for p in splits)
    if any(p["type"] == "ByteLevel" for p in splits):
        prefixes = {"", data["model"].get("continuing_subword_prefix") or ""}
        has_bytes = all(prefix + letter in ids for letter in LETTER_BYTES for prefix in prefixes)
    else:
        has_bytes = bool(data["model"].get("byte_fallback")) and all(f"<0x{b:02X}>" in ids for b in range(256))
    strips = any(t.get("lstrip") or t.get("rstrip") for t in data.get("added_tokens") or [] if not t.get("special"))
    return data.get("normalizer") is None and keeps_text and not adds_space and has_bytes and not strips


@dataclass(frozen=True)
class _PieceDecoder:
    """Converts pieces of a vocabulary to bytes, according to its decoders."""

    byte_level: bool
    """Pieces consist of the letters of `byte_letters`."""
    byte_tokens: bool
    """A piece `<0xNN>` is a byte."""
    metaspace: bool
    """`▁` is a space."""
    words: bool
    """Pieces are words without their spaces."""
    continuing_prefix: str
    """Prefix of a piece inside a word, such as `##`; else ""."""
    leading_space: bool
    """Decoding yields a space before the text that is not part of it."""

    @classmethod
    def of(cls, data: dict[str, Any]) -> "_PieceDecoder":
        model = data["model"]
        decoders = {d["type"]: d for d in _flatten(data.get("decoder"), "decoders")}
        byte_level = "ByteLevel" in decoders
        words = (model["type"] == "WordPiece" and not byte_level) or (model["type"] == "WordLevel" and not decoders)
        stripped = bool(decoders.get("Strip", {}).get("start"))
        prefixed = decoders.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return cls(
            byte_level=byte_level,
            byte_tokens="ByteFallback" in decoders or bool(model.get("byte_fallback")),
            metaspace=METASPACE in str(data.get("decoder")),
            words=words,
            continuing_prefix=model["continuing_subword_prefix"] if model["type"] == "WordPiece" else "",
            leading_space=words or stripped or prefixed,
        )

    def table(self, ids: Mapping[str, int], added: set[str], vocab: int) -> list[bytes]:
        """The bytes of each id [vocab]; empty for an id without a piece."""
        table = [b""] * vocab
        for piece, id in ids.items():
            table[id] = piece.encode() if piece in added else self._bytes(piece)
        return table

    def _bytes(self, piece: str) -> bytes:
        inside_word = bool(self.continuing_prefix) and piece.startswith(self.continuing_prefix)
        text = piece.removeprefix(self.continuing_prefix)
        if self.byte_level and all(letter in LETTER_BYTES for letter in text):
            return bytes(LETTER_BYTES[letter] for letter in text)
        if self.byte_tokens and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        text = text.replace(METASPACE, " ") if self.metaspace else text
        return (" " + text if self.words and not inside_word else text).encode()


def _flatten(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The members of a component in order, with nested sequences flattened."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for member in component[key] for part in _flatten(member, key)]
