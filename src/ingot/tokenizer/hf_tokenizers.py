"""Tokenizers of the Hugging Face `tokenizers` library: word, WordPiece, Unigram, SentencePiece BPE, imported files.

The definition is the library's `tokenizer.json` as JSON data, so a trained tokenizer is exported unchanged and an
imported one encodes as in the library, with two differences. Text never produces special tokens: inside the library
they have random placeholder names (also in the vocabulary, where Unigram would match `</s>` like any other piece). And
ids are decoded by a table of bytes, because the library's `decode` inserts and drops spaces and cannot decode half a
character.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer, random_placeholders
from ingot.tokenizer.hf_decoders import LETTER_BYTES, PieceDecoder
from ingot.tokenizer.hf_fields import flattened, leaves_out_bos, suffix_as_blank, types_of


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
        self.skips_characters = self.unknown is None and not _spells_every_byte(self.data, ids)
        decoder = PieceDecoder(self.data)
        self._leading_space, self.trailing_space = decoder.leading_space, decoder.trailing_space
        self._bytes = [b""] * self.vocab  # empty for an id without a piece
        for piece, id in ids.items():
            by_name = piece in self.specials and id != self.unknown
            self._bytes[id] = piece.encode() if by_name else decoder.bytes_of(piece)
        self.lengths = np.array([len(b) for b in self._bytes], dtype=np.int64)
        self.lengths[list(self.specials.values())] = 0
        if self.unknown is not None:
            self.lengths[self.unknown] = 0

    @property
    def bos(self) -> int | None:
        name = self.special_tokens_map.get("bos_token", "")
        return None if leaves_out_bos(self.data, name) else super().bos

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
        text = text[1:] if self._leading_space and text.startswith(" ") else text
        return text[:-1] if self.trailing_space and text.endswith(" ") else text

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return b"".join(map(self._bytes.__getitem__, np.asarray(ids).tolist()))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[int(token)]

    def definition(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "names": dict(self.special_tokens_map),
            **self.chat_format,
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
    splits = flattened(data.get("pre_tokenizer"), "pre_tokenizer")
    keeps_text = all(p["type"] in ("Split", "Digits", "ByteLevel") and p.get("behavior") != "Removed" for p in splits)
    keeps_text = keeps_text and not suffix_as_blank(data) and data.get("normalizer") is None
    adds_space = any(p.get("add_prefix_space") for p in splits)
    strips = any(t.get("lstrip") or t.get("rstrip") for t in data.get("added_tokens") or [] if not t.get("special"))
    return keeps_text and not adds_space and not strips and _spells_every_byte(data, ids)


def _spells_every_byte(data: dict[str, Any], ids: Mapping[str, int]) -> bool:
    byte_level = types_of(data.get("pre_tokenizer"), "pre_tokenizer") | types_of(data.get("normalizer"), "normalizer")
    if "ByteLevel" in byte_level:
        prefixes = {"", data["model"].get("continuing_subword_prefix") or ""}
        suffixes = {"", data["model"].get("end_of_word_suffix") or ""}
        return all(p + letter + s in ids for letter in LETTER_BYTES for p in prefixes for s in suffixes)
    return bool(data["model"].get("byte_fallback")) and all(f"<0x{b:02X}>" in ids for b in range(256))
