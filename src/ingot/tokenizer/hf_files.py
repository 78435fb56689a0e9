"""Imports the tokenizer of a Hugging Face model directory, and exports one that `transformers` reads with equal ids.

Supported are `tokenizer.json` (with the companions of `files.COMPANION_FILES`), the two files of GPT-2 (`encoder.json`
+ `vocab.bpe`, or `vocab.json` + `merges.txt`) and a model of SentencePiece (`tokenizer.model`, `spiece.model`). None
contains code, and Python in the directory is ignored.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_write
from ingot.core.errors import UserError
from ingot.tokenizer.base import FORMAT, Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, Char, load_tokenizer
from ingot.tokenizer.chat_template import with_defaults
from ingot.tokenizer.files import COMPANION_FILES, SENTENCEPIECE_FILES, read_object, read_text, tokenizer_files
from ingot.tokenizer.gpt2_files import byte_level_bpe, read_gpt2
from ingot.tokenizer.hf_decoders import byte_letters
from ingot.tokenizer.hf_fields import ROLES, Notify, check_config, check_fields, surrounding, switch_off, with_bos
from ingot.tokenizer.hf_tokenizers import HFTokenizer, added_tokens, backend_data, ids_of, load_backend
from ingot.tokenizer.sentencepiece_files import read_sentencepiece, write_sentencepiece
from ingot.tokenizer.settings import BYTES, TURNS

FILE = "file"
"""Kind of an imported tokenizer."""
TURNS_JINJA = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The chat format `turns` as a Jinja template, for export."""


def import_tokenizer(path: Path, notify: Notify = lambda message: None) -> Tokenizer:
    """The tokenizer of a model directory, or of a tokenizer or train stage.

    Args:
        path: a directory, or the `tokenizer.json` in it.
        notify: receives a message about each part of the files that is switched off or not used.

    Raises:
        UserError: files are missing, unreadable, in an unsupported format, or with a part that is not known.
    """
    files = {file.name: file for file in tokenizer_files(path)}
    configs = {name: read_object(files[name]) for name in COMPANION_FILES if name in files and name.endswith(".json")}
    config = configs.get("tokenizer_config.json", {})
    if "tokenizer.json" in files:
        data = read_object(files["tokenizer.json"])
        if data.get("format") == FORMAT:  # the file of an ingot stage
            return load_tokenizer(files["tokenizer.json"])
        if not isinstance(data.get("model"), dict):
            raise UserError(f"{files['tokenizer.json']}: found no model, expected a file of the tokenizers library")
    else:
        vocabulary = [file for name, file in files.items() if name not in COMPANION_FILES]
        class_name = config.get("tokenizer_class")
        read = read_sentencepiece if vocabulary[0].name in SENTENCEPIECE_FILES else read_gpt2
        data, roles = read(*vocabulary, class_name=class_name and str(class_name))
        config = {**roles, **config}
        if vocabulary[0].name in SENTENCEPIECE_FILES and config.get("legacy") is False:
            notify("tokenizer_config.json: legacy = false is not used: text after a special token begins with a blank")
    try:
        data = _with_model_type(data)
        check_fields(data)
        data = switch_off(data, notify)
        if {"tokenizer.json", *SENTENCEPIECE_FILES} & files.keys():
            check_config(config, data, notify)
        data = _apply_config(data, config, configs.get("added_tokens.json", {}))
        ids = ids_of(data)
        special_tokens_map = _special_tokens_map(data, config, configs, notify)
        data = {**data, "added_tokens": _mark_special(data, config, special_tokens_map, ids, notify)}
        if bos := special_tokens_map.get("bos_token"):
            data = with_bos(data, config, bos, ids[bos])
        _notify_unwritten(data, special_tokens_map, notify)
        template = _template(files, configs, ids, notify)
        tokenizer = HFTokenizer(FILE, data, special_tokens_map, template, _stops(configs, len(ids)))
        _notify_ordinary_stops(tokenizer, notify)
        return tokenizer
    except UserError as error:
        raise UserError(f"{next(iter(files.values())).parent}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        file = next(iter(files.values()))
        raise UserError(
            f"{file}: expected the format of the tokenizers library ({type(error).__name__}: {error})"
        ) from None


def export_tokenizer(tokenizer: Tokenizer, directory: Path) -> list[Path]:
    """Write `tokenizer.json`, `tokenizer_config.json`, and with a chat format `chat_template.jinja`.

    A tokenizer that SentencePiece can express, such as an imported one of Llama, is also written as `tokenizer.model`.

    `transformers.AutoTokenizer` gives the same ids as `encode` and renders the same conversations. The exception is
    text with the name of a special token, which it encodes as the token unless `split_special_tokens=True`.

    Returns:
        The files written.

    Raises:
        UserError: a type or pattern that the format cannot express.
    """
    data = _data(tokenizer)
    try:
        load_backend(data)
    except UserError as error:  # training uses another regex engine, so a pattern can be invalid in the library
        raise UserError(f"export: {error}; train the tokenizer with another pattern") from None
    files: dict[str, str | bytes] = {
        "tokenizer.json": json.dumps(data, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(tokenizer), ensure_ascii=False, indent=2) + "\n",
    }
    if tokenizer.template:
        source = TURNS_JINJA if tokenizer.template == TURNS else tokenizer.template
        files["chat_template.jinja"] = with_defaults(source, tokenizer.template_variables)
    if model := write_sentencepiece(data, tokenizer.special_tokens_map):
        files[SENTENCEPIECE_FILES[0]] = model
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        atomic_write(directory / name, content)
    return [directory / name for name in files]


def _data(tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.data
    if isinstance(tokenizer, ByteBPE):
        return _byte_bpe(tokenizer)
    if isinstance(tokenizer, Char) and tokenizer.alphabet is not None:
        return _characters(tokenizer.alphabet)
    raise UserError(
        f"export: a {tokenizer.kind} tokenizer of all Unicode code points cannot be written as tokenizer.json; "
        'train one with alphabet = "corpus"'
    )


def _byte_bpe(tokenizer: ByteBPE) -> dict[str, Any]:
    letters = byte_letters()
    pieces = {token: "".join(letters[b] for b in token) for token in tokenizer.tokens}
    merges = [[pieces[a], pieces[b]] for a, b in merges_of(tokenizer.tokens)]
    vocab = {pieces[token]: id for id, token in enumerate(tokenizer.tokens)}
    return byte_level_bpe(vocab, merges, tokenizer.specials, tokenizer.pattern)


def merges_of(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that was merged into each token after the 256 bytes.

    All earlier merges, applied to a token's bytes, leave exactly this pair. In a text the token results from the same
    pair: no earlier merge crossed its ends, so the merges inside were those of its bytes alone. Hence the tokenizers
    library, which merges listed pairs, and tiktoken, which merges any pair that forms an earlier token, agree.

    Args:
        tokens: the tokens of a byte-level BPE in merge order, the 256 bytes first.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens[BYTES:]:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, len(tokens)), at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
            rank, at = min(pairs)
            assert rank < ranks[token], f"{token!r} is not a merge of earlier tokens"
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def _characters(alphabet: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": r"(?m:.)"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: n for n, c in enumerate(alphabet)}, "unk_token": ""},
    }


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    mapped = set(tokenizer.special_tokens_map.values())
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens_map,
        "additional_special_tokens": [name for name in tokenizer.specials if name not in mapped],
        "clean_up_tokenization_spaces": False,
    }


def _with_model_type(data: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` with the type of its model, which old files such as GPT-2's leave to the library to find out."""
    if "type" in data["model"]:
        return data
    return {**data, "model": {"type": backend_data(load_backend(data))["model"]["type"], **data["model"]}}


def _apply_config(data: dict[str, Any], config: dict[str, Any], added: dict[str, int]) -> dict[str, Any]:
    """A `tokenizer.json` completed by its companions: added tokens, and of GPT-2's files `add_prefix_space`.

    As in transformers, the properties in `added_tokens_decoder` replace those in `tokenizer.json`.

    Args:
        data: `tokenizer.json`.
        config: `tokenizer_config.json`.
        added: `added_tokens.json`, token -> id.
    """
    tokens = {token["content"]: token for token in data.get("added_tokens") or []}
    decoder = {t["content"]: {**t, "id": int(id)} for id, t in (config.get("added_tokens_decoder") or {}).items()}
    for name, token in decoder.items():
        if (own := tokens.get(name, token))["id"] != token["id"]:
            raise UserError(
                f"tokenizer_config.json: added_tokens_decoder gives {name!r} the id {token['id']}, tokenizer.json "
                f"{own['id']}; correct one of them"
            )
    plain = {token["content"]: {**token, "special": False} for token in added_tokens(added)}
    new = {name: token for name, token in plain.items() if name not in tokens}
    merged = tokens | new | {name: {**tokens.get(name, {}), **token} for name, token in decoder.items()}
    pre_tokenizer = data.get("pre_tokenizer") or {}
    if "add_prefix_space" in pre_tokenizer and isinstance(config.get("add_prefix_space"), bool):
        pre_tokenizer = {**pre_tokenizer, "add_prefix_space": config["add_prefix_space"]}
    by_id = sorted(merged.values(), key=lambda token: token["id"])
    return {**data, "added_tokens": by_id, "pre_tokenizer": pre_tokenizer or None}


def _special_tokens_map(
    data: dict[str, Any], config: dict[str, Any], configs: dict[str, dict[str, Any]], notify: Notify
) -> dict[str, str]:
    """Role -> special token, from the tokenizer's files, or else from the ids in the model's configs.

    Those may be the defaults of a class, which in this vocabulary are ordinary text, so only ids of added tokens count;
    and a `bos_token` of null, unlike none, means that a text begins without one.
    """
    ids, special_tokens_map = ids_of(data), dict[str, str]()
    added = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    for role in ROLES:
        stated = configs.get("special_tokens_map.json", {}), config
        other, name = (_content(file.get(role), role) for file in stated)
        if other and name and other != name:
            notify(f"special_tokens_map.json: {role} is {other!r}; {name!r} of tokenizer_config.json is used")
        name = name or other
        if not name and role != "unk_token" and not (role == "bos_token" and any(role in file for file in stated)):
            name = next((token for token, id in added.items() if id in _config_ids(configs, role)), None)
        if name and (name in added or (name in ids and role != "pad_token")):
            special_tokens_map[role] = name
        elif name in ids:
            notify(f"{role} is {name!r}, which is ordinary text; it is not used, since padding is never learned")
        elif name and role in ("eos_token", "bos_token"):
            raise UserError(f"{role} is {name!r}, which has no id; correct tokenizer_config.json")
        elif name:
            notify(f"{role} is {name!r}, which has no id; it is not used")
    return special_tokens_map


def _config_ids(configs: dict[str, dict[str, Any]], role: str) -> list[Any]:
    """The first id of a role in the generation config, or else in the model's, as a list; empty if there is none."""
    values = (configs.get(file, {}).get(f"{role}_id") for file in ("generation_config.json", "config.json"))
    value = next((value for value in values if value not in (None, [])), [])
    return value[:1] if isinstance(value, list) else [value]


def _notify_unwritten(data: dict[str, Any], special_tokens_map: dict[str, str], notify: Notify) -> None:
    """Name the special tokens around a text that documents will not have, and a missing end of text."""
    front, back = surrounding(data)
    written = special_tokens_map.get("bos_token"), special_tokens_map.get("eos_token")
    if others := [name for name in (*front, *back) if name not in written]:
        notify(
            f"tokenizer.json: post_processor puts {', '.join(others)} around a text; ingot writes only bos_token "
            "before and eos_token after a document"
        )
    if "eos_token" not in special_tokens_map:
        notify(
            "the tokenizer has no end of text (eos_token), so documents follow each other without a sign between them "
            "and a model does not learn to end a text; name one of its tokens as eos_token in tokenizer_config.json"
        )


def _notify_ordinary_stops(tokenizer: HFTokenizer, notify: Notify) -> None:
    ordinary = [id for id in tokenizer.stops if id not in tokenizer.specials.values()]
    if ordinary:
        text = tokenizer.decode(ordinary[:1])
        notify(f"eos_token_id of the model is {ordinary[0]}, which is the ordinary text {text!r}; it ends every answer")


def _content(value: Any, name: str) -> str | None:
    """The name of a special token, which may be an object with its properties; `name` of the field is for errors."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise UserError(f"tokenizer_config.json: {name}: found {value!r}, expected a token; correct it")
    return content


def _mark_special(
    data: dict[str, Any],
    config: dict[str, Any],
    special_tokens_map: dict[str, str],
    ids: dict[str, int],
    notify: Notify,
) -> list[dict[str, Any]]:
    """The added tokens with `special` set for all that the config declares special."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    names = [_content(t, "extra_special_tokens") for t in (extra.values() if isinstance(extra, dict) else extra)]
    if missing := [name for name in names if name and name not in ids]:
        notify(f"tokenizer_config.json: {', '.join(missing)} among the special tokens without an id; not used")
    special = {*special_tokens_map.values(), *names}
    added = data.get("added_tokens") or []
    if plain := [t["content"] for t in added if t["content"] in special and not t.get("special")]:
        notify(f"tokenizer_config.json: {', '.join(plain)} made special, so that texts never give the token")
    added = [{**t, "special": t.get("special") or t["content"] in special} for t in added]
    known = {token["content"] for token in added}
    new = added_tokens({name: ids[name] for name in special if name in ids and name not in known})
    return sorted([*added, *new], key=lambda token: token["id"])


def _stops(configs: dict[str, dict[str, Any]], vocab: int) -> list[int]:
    """`eos_token_id` of the generation config, or else of the model config, as a list of ids."""
    for file in ("generation_config.json", "config.json"):
        if "eos_token_id" in (config := configs.get(file, {})):
            value = config["eos_token_id"]
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(type(id) is int for id in ids):
                raise UserError(f"{file}: eos_token_id: found {value!r}, expected an id or a list of ids; correct it")
            return sorted({id for id in ids if 0 <= id < vocab})
    return []


def _template(files: dict[str, Path], configs: dict[str, dict[str, Any]], ids: dict[str, int], notify: Notify) -> str:
    """The directory's chat template, or "". The exported template of `turns` is read back as `turns`."""
    source: Any = None
    if "chat_template.jinja" in files:
        source = read_text(files["chat_template.jinja"])
    for file in ("chat_template.json", "tokenizer_config.json"):
        source = source or configs.get(file, {}).get("chat_template")
    if isinstance(source, list):
        by_name = {template["name"]: template["template"] for template in source}
        source = by_name.pop("default", None)
        if by_name:
            notify(f"chat_template: not used: {', '.join(by_name)}; only the template named default is")
    if source is not None and not isinstance(source, str):
        raise UserError(f"chat_template: found {type(source).__name__}, expected the text of a template; correct it")
    if source == TURNS_JINJA and "<|end|>" in ids:
        return TURNS
    return source or ""
