"""The fields of a foreign tokenizer's files: what is used, switched off with a message, or refused by name.

The tokenizers library ignores fields that it does not know, so every field is looked up in a table here. One that is in
no table is refused unless it is empty (null, false, 0, "" or an empty container). In `tokenizer_config.json`, where
processors and older versions leave much that concerns no text, unknown fields are named in one message.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.core.errors import UserError

Notify = Callable[[str], None]

_SPACE = {"add_prefix_space", "trim_offsets", "use_regex"}
_METASPACE = {"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"}
_REPLACE = {"pattern", "content"}
COMPONENTS: dict[str, dict[str, set[str]]] = {
    "normalizer": {
        "Sequence": {"normalizers"},
        "BertNormalizer": {"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"},
        "Strip": {"strip_left", "strip_right"},
        "Precompiled": {"precompiled_charsmap"},
        "Replace": _REPLACE,
        "Prepend": {"prepend"},
        **{name: set() for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")},
    },
    "pre_tokenizer": {
        "Sequence": {"pretokenizers"},
        "ByteLevel": _SPACE,
        "Metaspace": _METASPACE,
        "Split": {"pattern", "behavior", "invert"},
        "Punctuation": {"behavior"},
        "Digits": {"individual_digits"},
        "CharDelimiterSplit": {"delimiter"},
        "Delimiter": {"delimiter"},
        "FixedLength": {"length"},
        **{name: set() for name in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")},
    },
    "model": {
        "BPE": {
            *("vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
            *("fuse_unk", "byte_fallback", "ignore_merges"),
        },
        "Unigram": {"vocab", "unk_id", "byte_fallback", "alpha", "nbest_size"},
        "WordPiece": {"vocab", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word"},
        "WordLevel": {"vocab", "unk_token"},
    },
    "post_processor": {
        "Sequence": {"processors"},
        "TemplateProcessing": {"single", "pair", "special_tokens"},
        "BertProcessing": {"sep", "cls"},
        "RobertaProcessing": {"sep", "cls", "trim_offsets", "add_prefix_space"},
        "ByteLevel": _SPACE,
    },
    "decoder": {
        "Sequence": {"decoders"},
        "ByteLevel": _SPACE,
        "ByteFallback": set(),
        "Fuse": set(),
        "Replace": _REPLACE,
        "Strip": {"content", "start", "stop"},
        "Metaspace": _METASPACE,
        "WordPiece": {"prefix", "cleanup"},
        "BPEDecoder": {"suffix"},
    },
}
"""Component of `tokenizer.json` -> its types -> the fields of each, all of which are used or switched off."""
_TOP = {"version", "truncation", "padding", "added_tokens", *COMPONENTS}
_MEMBERS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_MEMBERS["post_processor"] = "processors"
_ADDED = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special", "__type"}

ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")
"""The special tokens that ingot gives a role."""
_CONFIG = {
    # used
    *(*ROLES, "sep_token", "cls_token", "mask_token", "additional_special_tokens", "extra_special_tokens"),
    *("added_tokens_decoder", "add_prefix_space", "add_bos_token", "chat_template", "tokenizer_class"),
    *("clean_up_tokenization_spaces", "do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    # no effect: documents always end in eos_token, prompts never, and special tokens in text are always split
    *("add_eos_token", "split_special_tokens"),
    # no effect on what tokenizer.json does: used to convert other files to it, or for padded and truncated batches
    *("legacy", "use_default_system_prompt", "spaces_between_special_tokens", "model_max_length", "max_length"),
    *("padding_side", "truncation_side", "stride", "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id"),
    *("model_input_names", "model_type", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file"),
    *("merges_file", "auto_map", "use_fast", "backend", "is_local", "local_files_only", "processor_class"),
    *("return_token_type_ids", "do_basic_tokenize", "never_split", "wordpieces_prefix", "init_inputs"),
    *("trim_offsets", "full_tokenizer_file", "max_len", "transformers_version", "extra_ids", "remove_space"),
}
_CONFIG_WITHOUT_EFFECT_IF = {"errors": "replace", "byte_fallback": True}


def check_fields(data: Mapping[str, Any]) -> None:
    """Raise UserError for a component of `tokenizer.json` of an unknown type, or with an unknown field."""
    _refuse_unknown(data, _TOP, "")
    for token in data.get("added_tokens") or []:
        _refuse_unknown(token, _ADDED, f"added_tokens, {token['content']!r}: ")
    for component, types in COMPONENTS.items():
        for where, part in _parts(data.get(component), component):
            if (name := part.get("type")) not in types:
                raise UserError(
                    f"tokenizer.json: {where}: found type {name!r}, expected {', '.join(sorted(types))}; what it does "
                    "to a text is not known, so use a tokenizer without it"
                )
            _refuse_unknown(part, {"type", *types[name]}, f"{where} ({name}): ")


def switch_off(data: Mapping[str, Any], notify: Notify) -> dict[str, Any]:
    """`tokenizer.json` without what makes ids random or cuts texts, and with a decoder."""
    model = dict(data["model"])
    for name in ("dropout", "alpha", "nbest_size"):
        if value := model.pop(name, None):
            notify(
                f"tokenizer.json: model.{name} = {value} is switched off; it would split the same text differently "
                "each time"
            )
    for name in ("truncation", "padding"):
        if data.get(name):
            notify(f"tokenizer.json: {name} is switched off; texts keep their length")
    decoder = data.get("decoder")
    if decoder is None and model["type"] != "WordLevel":
        decoder = _inverse(data)
        doing = f"text is decoded by {decoder['type']}" if decoder else "pieces are decoded with a blank between them"
        notify(f"tokenizer.json: decoder is null; {doing}")
    elif (suffix := suffix_as_blank({"model": model, "decoder": decoder})) != (
        _field(decoder, "BPEDecoder", "suffix") or ""
    ):
        notify(f"tokenizer.json: its decoder leaves the end of a word, {suffix!r}, in texts; it is decoded as a blank")
    _check_prefix(model, decoder)
    return {**data, "model": model, "decoder": decoder, "truncation": None, "padding": None}


def check_config(config: Mapping[str, Any], data: Mapping[str, Any], notify: Notify) -> None:
    """Check `tokenizer_config.json` against `tokenizer.json`, which determines ids and text.

    Raises:
        UserError: a field that contradicts it, so that the ids depend on the reader.
    """
    if config.get("fix_mistral_regex"):
        raise UserError(
            "tokenizer_config.json: fix_mistral_regex replaces the pattern of tokenizer.json, which is not known here; "
            "save the tokenizer with transformers, and remove the field"
        )
    normalizers = dict(_typed(data.get("normalizer"), "normalizer"))
    splits = dict(_typed(data.get("pre_tokenizer"), "pre_tokenizer"))
    facts: dict[str, bool | None] = {}
    if "BertNormalizer" in normalizers:
        bert = normalizers["BertNormalizer"]
        facts = {"strip_accents": bert.get("strip_accents"), "tokenize_chinese_chars": bert["handle_chinese_chars"]}
    if "BertNormalizer" in normalizers or "Lowercase" in normalizers:
        bert = normalizers.get("BertNormalizer", {})
        facts["do_lower_case"] = "Lowercase" in normalizers or bert["lowercase"]
    spaces = [splits["ByteLevel"]["add_prefix_space"]] if "ByteLevel" in splits else []
    spaces += [prepends(splits["Metaspace"])] if "Metaspace" in splits else []
    spaces += [True] if "Prepend" in normalizers else []
    if spaces:
        facts["add_prefix_space"] = any(spaces)
    for name, actual in facts.items():
        if isinstance(stated := config.get(name), bool) and isinstance(actual, bool) and stated != actual:
            raise UserError(
                f"tokenizer_config.json: {name} = {str(stated).lower()} contradicts tokenizer.json, where it is "
                f"{str(actual).lower()}, and readers differ in which they follow; correct one of them"
            )
    if config.get("clean_up_tokenization_spaces") and data["model"]["type"] != "BPE":
        notify("tokenizer_config.json: clean_up_tokenization_spaces is not applied; decoded texts keep their blanks")
    unused = (name for name, value in config.items() if name not in _CONFIG and not name.startswith("_") and value)
    if names := [name for name in unused if config[name] != _CONFIG_WITHOUT_EFFECT_IF.get(name)]:
        notify(f"tokenizer_config.json: not used: {', '.join(sorted(names))}")


def with_bos(data: Mapping[str, Any], config: Mapping[str, Any], bos: str, id: int) -> dict[str, Any]:
    """`tokenizer.json` whose post-processor follows `add_bos_token`, where `tokenizer_config.json` has it."""
    stated = config.get("add_bos_token")
    if not isinstance(stated, bool) or stated != leaves_out_bos(data, bos):
        return dict(data)
    front = [{"SpecialToken": {"id": bos, "type_id": 0}}] if stated else []
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    token = {bos: {"id": bos, "ids": [id], "tokens": [bos]}} if stated else {}
    pair = [*front, *sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": [*front, *sequence], "pair": pair, "special_tokens": token}
    return {**data, "post_processor": template}


def surrounding(data: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The special tokens that the post-processor puts before and after a text."""
    front: list[str] = []
    back: list[str] = []
    for name, part in _typed(data.get("post_processor"), "post_processor"):
        if name == "TemplateProcessing":
            entries = part["single"]
            at = next((n for n, entry in enumerate(entries) if "Sequence" in entry), len(entries))
            front = [entry["SpecialToken"]["id"] for entry in entries[:at]]
            back = [entry["SpecialToken"]["id"] for entry in entries[at + 1 :] if "SpecialToken" in entry]
        elif name in ("BertProcessing", "RobertaProcessing"):
            front, back = [part["cls"][0]], [part["sep"][0]]
    return front, back


def leaves_out_bos(data: Mapping[str, Any], bos: str) -> bool:
    """Whether the tokenizer's own post-processor decides what precedes a text, and that is not `bos`."""
    deciding = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}
    return bool(deciding & types_of(data.get("post_processor"), "post_processor")) and bos not in surrounding(data)[0]


def prepends(metaspace: Mapping[str, Any]) -> bool:
    """Whether a `Metaspace` puts a blank before a text; old files say so by `add_prefix_space`."""
    scheme = metaspace.get("prepend_scheme")
    return scheme != "never" if scheme else bool(metaspace.get("add_prefix_space", True))


def types_of(component: Mapping[str, Any] | None, name: str) -> set[str]:
    """The types of a component and of its members."""
    return {type for type, _ in _typed(component, name)}


def flattened(component: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The members of a component in order, without the sequences that contain them."""
    return [part for type, part in _typed(component, name) if type != "Sequence"]


def suffix_as_blank(data: Mapping[str, Any]) -> str:
    """The end of a word that stands for a blank in texts, such as `</w>`; "" for none, or if the decoder removes it."""
    parts = dict(_typed(data.get("decoder"), "decoder"))
    suffix = data["model"].get("end_of_word_suffix") or parts.get("BPEDecoder", {}).get("suffix") or ""
    removed = {"pattern": {"Regex": f"{re.escape(suffix)}$"}, "content": ""}
    return "" if parts.get("Replace", {}).items() >= removed.items() else suffix


def _check_prefix(model: Mapping[str, Any], decoder: Mapping[str, Any] | None) -> None:
    prefix = model.get("continuing_subword_prefix")
    if model["type"] != "BPE" or not prefix:
        return
    if _field(decoder, "WordPiece", "prefix") != prefix:
        raise UserError(
            f"tokenizer.json: model.continuing_subword_prefix is {prefix!r}, but its decoder does not remove it from "
            f"texts; set the decoder to WordPiece with this prefix"
        )


def _field(decoder: Mapping[str, Any] | None, type: str, name: str) -> Any:
    """A field of the decoder of a type; None if there is none."""
    return dict(_typed(decoder, "decoder")).get(type, {}).get(name)


def _inverse(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The decoder that reverses the other components of a file without one; None if nothing tells."""
    model = data["model"]
    before = dict(_typed(data.get("pre_tokenizer"), "pre_tokenizer"))
    if "ByteLevel" in before or "ByteLevel" in types_of(data.get("normalizer"), "normalizer"):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if "Metaspace" in before:
        return {"type": "Metaspace", "split": True, **before["Metaspace"]}
    if model.get("end_of_word_suffix"):
        return {"type": "BPEDecoder", "suffix": model["end_of_word_suffix"]}
    if prefix := model.get("continuing_subword_prefix"):
        return {"type": "WordPiece", "prefix": prefix, "cleanup": False}
    return None


def _refuse_unknown(part: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in part.items():
        if name not in known and value:
            raise UserError(
                f"tokenizer.json: {where}found the field {name!r}, which is not known; what it does to a text is lost, "
                "so use a tokenizer without it"
            )


def _typed(component: Mapping[str, Any] | None, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((part["type"], part) for _, part in _parts(component, name))


def _parts(component: Mapping[str, Any] | None, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, part) of a component and, of a sequence, of its members."""
    if component is None:
        return
    yield name, component
    for n, member in enumerate(component.get(_MEMBERS.get(name, ""), []) if component["type"] == "Sequence" else []):
        for where, part in _parts(member, name):
            yield f"{name}[{n}]{where.removeprefix(name)}", part
