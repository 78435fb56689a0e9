"""Reads and writes SentencePiece's `tokenizer.model` (`spiece.model` of T5) as the data of a `tokenizer.json`.

The model is a protocol buffer (https://github.com/google/sentencepiece, `sentencepiece_model.proto`) of pieces with
scores and types, and of the normaliser's settings. BPE with or without byte fallback and Unigram have exact
counterparts in the tokenizers library, which encodes the texts. Whatever has none is refused by name.
"""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError
from ingot.tokenizer.hf_tokenizers import added_tokens, ids_of
from ingot.tokenizer.protobuf import Message, content, encode, integer, parse, real

SPACE = "▁"
UNIGRAM, BPE = 1, 2
_MODEL_TYPES = {UNIGRAM: "Unigram", BPE: "BPE", 3: "word", 4: "char"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""
PIECES, TRAINER, NORMALIZER, SELF_TEST, DENORMALIZER = range(1, 6)
"""Fields of the model."""
MODEL_TYPE, SPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35
"""Fields of the trainer's settings that concern the encoding; others only made the vocabulary."""
ROLE_IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
"""Role -> (field of the trainer's settings with its id, default)."""
NAME, CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_SPACES, ESCAPE_SPACES, RULES = range(1, 7)
"""Fields of the normaliser's settings."""

CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer")
"""Classes of transformers whose ids are those of the model's pieces."""
_WITHOUT_BOS = ("T5Tokenizer",)
_HOW = "convert the tokenizer to tokenizer.json with transformers"
_BYTE_NAME = "<(?=0x[0-9A-F]{2}>)"
"""The first character of the name of a byte in a text, which SentencePiece never reads as that byte."""


class Piece(NamedTuple):
    """A piece of the vocabulary; its position is its id."""

    text: str
    score: float
    type: int


def read_sentencepiece(path: Path, class_name: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """A SentencePiece model.

    Args:
        path: the file.
        class_name: `tokenizer_class` of `tokenizer_config.json`, if it has one.

    Returns:
        The content of `tokenizer.json`, and the special token of each role.

    Raises:
        UserError: no such model, a part without a counterpart, or a class that changes the ids.
    """
    name = (class_name or CLASSES[0]).removesuffix("Fast")
    if name not in CLASSES:
        raise UserError(
            f"{path}: found the class {class_name} in tokenizer_config.json, expected {', '.join(CLASSES)} or none, "
            f"because others change ids or texts in their code; {_HOW}"
        )
    try:
        model = parse(path.read_bytes())
        pieces = [_piece(value) for value in model.get(PIECES, [])]
        if not pieces or TRAINER not in model:
            raise ValueError("found no pieces")
        trainer, normalizer = parse(content(model, TRAINER)), parse(content(model, NORMALIZER))
        denormalizer = parse(content(model, DENORMALIZER))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a SentencePiece model ({error}), expected one (Llama 3's tokenizer.model is a list of "
            f"tiktoken's tokens); copy the file again, or {_HOW}"
        ) from None
    try:
        _check(trainer, normalizer, denormalizer, pieces)
        data = _data(trainer, normalizer, pieces)
    except UserError as error:
        raise UserError(f"{path}: {error}; {_HOW}") from None
    ids = {role: integer(trainer, *field) for role, field in ROLE_IDS.items()}
    roles = {role: pieces[id].text for role, id in ids.items() if 0 <= id < len(pieces)}
    return data, {role: text for role, text in roles.items() if role != "bos_token" or name not in _WITHOUT_BOS}


def write_sentencepiece(data: Mapping[str, Any], roles: Mapping[str, str]) -> bytes | None:
    """The SentencePiece model of a `tokenizer.json`; None if it has none, which reading it back finds out.

    Args:
        data: the content of `tokenizer.json`.
        roles: `eos_token` and so on -> special token.
    """
    kinds = {"BPE": BPE, "Unigram": UNIGRAM}
    ids = ids_of(dict(data))
    if data["model"]["type"] not in kinds or sorted(ids.values()) != [*range(len(ids))]:
        return None
    trainer: list[tuple[int, Any]] = [(MODEL_TYPE, kinds[data["model"]["type"]]), (4, len(ids))]
    trainer += [(BYTE_FALLBACK, 1)] if data["model"].get("byte_fallback") else []
    for role, (field, _) in ROLE_IDS.items():
        id = ids.get(roles.get(role, ""), -1)
        trainer += [(field, id), *([(field + 5, roles[role].encode())] if id >= 0 else [])]  # the id, the name
    pieces = list(_pieces(data, ids, roles))
    normalizer = _normalizer_fields(data.get("normalizer") or {})
    try:
        parsed = parse(encode(trainer)), parse(encode(normalizer)), {}
        _check(*parsed, pieces)
        if not _same(_data(*parsed[:2], pieces), data):
            return None
    except UserError:
        return None
    encoded = [(PIECES, encode([(1, p.text.encode()), (2, float(p.score)), (3, p.type)])) for p in pieces]
    return encode([*encoded, (TRAINER, encode(trainer)), (NORMALIZER, encode(normalizer))])


def _piece(value: int | bytes) -> Piece:
    if not isinstance(value, bytes):
        raise ValueError("found a number as a piece")
    message = parse(value)
    if unknown := sorted(message.keys() - {1, 2, 3}):
        raise ValueError(f"a piece has the unknown field {unknown[0]}")
    return Piece(content(message, 1).decode(), real(message, 2), integer(message, 3, NORMAL))


def _check(trainer: Message, normalizer: Message, denormalizer: Message, pieces: list[Piece]) -> None:
    """Raise UserError for what the tokenizers library cannot do."""
    kind = integer(trainer, MODEL_TYPE, UNIGRAM)
    if kind not in (BPE, UNIGRAM):
        raise UserError(f"found a model of type {_MODEL_TYPES.get(kind, kind)}, expected BPE or Unigram")
    if unknown := sorted(normalizer.keys() - {NAME, CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_SPACES, ESCAPE_SPACES, RULES}):
        raise UserError(f"found the field {unknown[0]} of normalizer_spec, which is not known")
    if integer(trainer, SPACE_AS_SUFFIX, 0):
        raise UserError("found treat_whitespace_as_suffix, which has no counterpart in tokenizer.json")
    if not integer(normalizer, ESCAPE_SPACES, 1):
        raise UserError("found escape_whitespaces = false, which has no counterpart in tokenizer.json")
    if content(denormalizer, CHARSMAP):
        raise UserError("found a denormalizer, which has no counterpart in tokenizer.json")
    types = {piece.type: piece.text for piece in pieces}
    if UNUSED in types or not types.keys() <= set(range(1, 7)):
        name = types.get(UNUSED) or next(text for type, text in types.items() if type not in range(1, 7))
        raise UserError(f"found the piece {name!r} of a type that has no counterpart in tokenizer.json")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise UserError("found a piece twice, expected different pieces")
    changes = integer(normalizer, DUMMY_PREFIX, 1) or integer(normalizer, REMOVE_EXTRA_SPACES, 1)
    if USER_DEFINED in types and (changes or content(normalizer, CHARSMAP)):
        raise UserError(
            f"found the user-defined piece {types[USER_DEFINED]!r} beside add_dummy_prefix, remove_extra_whitespaces "
            "or a map of characters, which tokenizer.json would apply between such pieces"
        )


def _data(trainer: Message, normalizer: Message, pieces: list[Piece]) -> dict[str, Any]:
    fallback = bool(integer(trainer, BYTE_FALLBACK, 0))
    unknown = next((id for id, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if unknown is None:
        raise UserError("found no unknown piece, expected one")
    texts = [piece.text for piece in pieces]
    ids = {text: id for id, text in enumerate(texts)}
    added = added_tokens({text: id for text, id in ids.items() if pieces[id].type in (CONTROL, UNKNOWN, USER_DEFINED)})
    own = {text for text, _, type in pieces if type == USER_DEFINED}  # found after a text is normalised
    model: dict[str, Any]
    pre_tokenizer: dict[str, Any] | None = None
    if integer(trainer, MODEL_TYPE, UNIGRAM) == BPE:
        model = {"type": "BPE", "unk_token": texts[unknown], "fuse_unk": True, "byte_fallback": fallback}
        model |= {"vocab": ids, "merges": _merges(pieces)}
    else:
        lowest = min((piece.score for piece in pieces if piece.type == NORMAL), default=0.0)
        scores = [lowest if piece.type == BYTE else piece.score for piece in pieces]
        model = {"type": "Unigram", "unk_id": unknown, "byte_fallback": fallback}
        model |= {"vocab": [list(pair) for pair in zip(texts, scores, strict=True)]}
        if fallback:
            behavior = {"behavior": "MergedWithPrevious", "invert": False}
            pre_tokenizer = {"type": "Split", "pattern": {"Regex": _BYTE_NAME}, **behavior}
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] if fallback else []
    decoders += [{"type": "Fuse"}]
    if integer(normalizer, DUMMY_PREFIX, 1):
        decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "version": "1.0",
        "added_tokens": [{**t, "special": t["content"] not in own, "normalized": t["content"] in own} for t in added],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer)},
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _normalizers(normalizer: Message) -> list[dict[str, Any]]:
    """SentencePiece's steps: map characters, remove extra spaces, put one before the text, and make them visible."""
    charsmap = content(normalizer, CHARSMAP)
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    around = {"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE}]+\z"}, "content": ""}
    inside = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    return [
        *([precompiled] if charsmap else []),
        *([around, inside] if integer(normalizer, REMOVE_EXTRA_SPACES, 1) else []),
        *([{"type": "Prepend", "prepend": SPACE}] if integer(normalizer, DUMMY_PREFIX, 1) else []),
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]


def _normalizer_fields(component: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """The normaliser's settings with these steps; `_same` finds out whether they are all."""
    steps = component.get("normalizers", [component])
    by_type = {step.get("type"): step for step in steps}
    charsmap = base64.b64decode(by_type.get("Precompiled", {}).get("precompiled_charsmap", ""))
    removes = any(step.get("pattern") == {"Regex": " {2,}"} for step in steps)
    flags = [(DUMMY_PREFIX, int("Prepend" in by_type)), (REMOVE_EXTRA_SPACES, int(removes)), (ESCAPE_SPACES, 1)]
    return [(NAME, b"identity"), *([(CHARSMAP, charsmap)] if charsmap else []), *flags]


def _merges(pieces: list[Piece]) -> list[list[str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece merges them: by descending score.

    Of two pairs of the same piece that overlap in a text, it merges the left one: of `ab`, `a`, `ba` the first two, if
    `aba` is a piece. So a split whose right part is also the piece's beginning comes first.
    """
    texts = {piece.text for piece in pieces if piece.type == NORMAL}
    merged = sorted((p for p in pieces if p.type == NORMAL and len(p.text) > 1), key=lambda piece: -piece.score)
    merges: list[list[str]] = []
    for n, piece in enumerate(merged):
        text = piece.text
        if any(letter not in texts for letter in text):
            raise UserError(f"found the piece {text!r} with a character that is no piece, expected one for each")
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        found = [[a, b] for a, b in splits if a in texts and b in texts]
        if found and n and merged[n - 1].score == piece.score:
            raise UserError(f"found the pieces {merged[n - 1].text!r} and {text!r} of one score, expected an order")
        merges += sorted(found, key=lambda pair: not text.startswith(pair[1]))
    return merges


def _pieces(data: Mapping[str, Any], ids: Mapping[str, int], roles: Mapping[str, str]) -> Iterator[Piece]:
    """The pieces of a `tokenizer.json` by id. In a BPE their order is that of its merges."""
    model, added = data["model"], {token["content"]: token for token in data.get("added_tokens") or []}
    if model["type"] == "BPE":
        order = ["".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1) for pair in model["merges"]]
        scores = {text: -float(n) for n, text in enumerate(dict.fromkeys(order))}
    else:
        scores = dict(model["vocab"])
    unknown = model.get("unk_token") or roles.get("unk_token")
    for text, _ in sorted(ids.items(), key=lambda item: item[1]):
        if text in added and added[text].get("special"):
            yield Piece(text, 0.0, UNKNOWN if text == unknown else CONTROL)
        elif text in added:
            yield Piece(text, scores.get(text, 0.0), USER_DEFINED)
        else:
            is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
            yield Piece(text, scores.get(text, 0.0), BYTE if is_byte else NORMAL)


def _same(ours: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Whether two contents of `tokenizer.json` give the same ids for ordinary text."""
    special = {token["content"] for token in data.get("added_tokens") or []}

    def essence(d: Mapping[str, Any]) -> Any:
        model = {k: v for k, v in d["model"].items() if k not in ("vocab", "dropout") and v not in (None, "", False)}
        vocab = d["model"]["vocab"]
        scores = {text: score for text, score in vocab if text not in special} if isinstance(vocab, list) else None
        model["merges"] = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model.get("merges", [])]
        return model, scores, ids_of(dict(d)), d.get("normalizer"), d.get("pre_tokenizer"), d.get("decoder")

    return essence(ours) == essence(data)
