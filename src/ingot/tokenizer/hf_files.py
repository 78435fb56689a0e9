"""Tokenizer files of model directories: read into a tokenizer, and written so that `transformers` gives the same ids.

Read are `tokenizer.json` (with `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
`chat_template.jinja` beside it) and the two files of GPT-2 (`encoder.json` + `vocab.bpe`, or `vocab.json` +
`merges.txt`). All of them are JSON or text: nothing that runs code is opened, and a directory's own Python is ignored.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_write
from ingot.core.errors import UserError
from ingot.tokenizer.base import FORMAT, Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, Char, load_tokenizer
from ingot.tokenizer.files import BESIDE, read_text, tokenizer_files
from ingot.tokenizer.hf_tokenizers import LibraryTokenizer, added_tokens, byte_letters, ids_of, read_library
from ingot.tokenizer.settings import BYTES, TURNS

FILE = "file"
"""Kind of an imported tokenizer."""
TURNS_JINJA = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The format `turns` for other programs."""
_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")


def import_tokenizer(path: Path) -> Tokenizer:
    """A model directory's tokenizer, or that of a tokenizer or train stage.

    Args:
        path: a directory, or the `tokenizer.json` in it.

    Raises:
        UserError: files are missing, unreadable, or of a format that is not supported.
    """
    files = {file.name: file for file in tokenizer_files(path)}
    told = {name: _table(files[name]) for name in BESIDE if name in files and name.endswith(".json")}
    config = told.get("tokenizer_config.json", {})
    if "tokenizer.json" in files:
        data = _table(files["tokenizer.json"])
        if data.get("format") == FORMAT:  # a stage of another run
            return load_tokenizer(files["tokenizer.json"])
        if not isinstance(data.get("model"), dict) or "type" not in data["model"]:
            raise UserError(
                f"{files['tokenizer.json']}: has no model with a type, expected a file of the tokenizers library"
            )
    else:
        vocab, merges = (file for name, file in files.items() if name not in BESIDE)
        kind = str(config.get("tokenizer_class", "GPT2Tokenizer"))
        if kind.removesuffix("Fast") != "GPT2Tokenizer":
            raise UserError(
                f"{vocab.parent}: {vocab.name} and {merges.name} of a {kind}, expected GPT-2's; how others split text "
                "is not in these files: save it once as tokenizer.json"
            )
        data = _gpt2(vocab, merges)
        config = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", **config}
    try:
        data = _as_told(data, config, told.get("added_tokens.json", {}))
        ids = ids_of(data)
        names = _names(config, told, ids)
        data = {**data, "added_tokens": _marked(data, config, names, ids)}
        template = _template(files, told, ids)
        return LibraryTokenizer(FILE, data, names, template, _stops(told, len(ids)))
    except UserError as error:
        raise UserError(f"{next(iter(files.values())).parent}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        file = next(iter(files.values()))
        raise UserError(f"{file}: not what the tokenizers library writes ({type(error).__name__}: {error})") from None


def export_tokenizer(tokenizer: Tokenizer, directory: Path) -> list[Path]:
    """Write `tokenizer.json`, `tokenizer_config.json` and, with a chat format, `chat_template.jinja`.

    `transformers.AutoTokenizer` then gives the same ids as `encode` for any text without the names of special tokens
    (which it takes for the tokens unless `split_special_tokens=True`), and renders conversations as we do.

    Returns:
        the files written.

    Raises:
        UserError: a type or a pattern that the format cannot express.
    """
    data = _data(tokenizer)
    try:
        read_library(data)
    except UserError as error:  # whose regular expressions are others than those that a pattern is trained with
        raise UserError(f"export: {error}; train the tokenizer with another pattern") from None
    files = {
        "tokenizer.json": json.dumps(data, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(tokenizer), ensure_ascii=False, indent=2) + "\n",
    }
    if tokenizer.template:
        files["chat_template.jinja"] = TURNS_JINJA if tokenizer.template == TURNS else tokenizer.template
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        atomic_write(directory / name, text)
    return [directory / name for name in files]


def byte_level(vocab: dict[str, int], merges: list[list[str]], specials: Mapping[str, int], pattern: str | None) -> Any:
    """A `tokenizer.json` of a byte-level BPE; without a pattern, GPT-2's own split."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = byte_level if pattern is None else {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "version": "1.0",
        "added_tokens": added_tokens(specials),
        "normalizer": None,
        "pre_tokenizer": steps,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _data(tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.data
    if isinstance(tokenizer, ByteBPE):
        return _byte_bpe(tokenizer)
    if isinstance(tokenizer, Char) and tokenizer.alphabet is not None:
        return _characters(tokenizer.alphabet)
    raise UserError(
        f"export: a {tokenizer.kind} tokenizer of all Unicode code points has no form in tokenizer.json; "
        'train one with alphabet = "corpus"'
    )


def _byte_bpe(tokenizer: ByteBPE) -> dict[str, Any]:
    letters = byte_letters()
    known = {token: "".join(letters[b] for b in token) for token in tokenizer.tokens}
    merges = [[known[a], known[b]] for a, b in merges_of(tokenizer.tokens)]
    vocab = {known[token]: id for id, token in enumerate(tokenizer.tokens)}
    return byte_level(vocab, merges, tokenizer.specials, tokenizer.pattern)


def merges_of(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of a trained byte-level BPE (bytes, then merges in order) was made of.

    A token's own bytes, joined by all earlier merges, end as exactly that pair. And wherever the token arises in a
    text, it arises from that pair: until its turn no merge has crossed its two ends, so inside them the same joins
    happened as in its bytes alone. Hence a program that joins listed pairs (the tokenizers library) and one that joins
    whatever spells an earlier token (tiktoken) agree.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens[BYTES:]:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, len(tokens)), at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
            rank, at = min(pairs)
            assert rank < ranks[token], f"{token!r} is no merge of earlier tokens"
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def _characters(alphabet: str) -> dict[str, Any]:
    every = {"type": "Split", "pattern": {"Regex": r"(?m:.)"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": every,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: n for n, c in enumerate(alphabet)}, "unk_token": ""},
    }


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    named = set(tokenizer.names.values())
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.names,
        "additional_special_tokens": [name for name in tokenizer.specials if name not in named],
        "clean_up_tokenization_spaces": False,
    }


def _gpt2(vocab_file: Path, merges_file: Path) -> dict[str, Any]:
    vocab: dict[str, int] = _table(vocab_file)
    if sorted(map(str, vocab.values())) != sorted(map(str, range(len(vocab)))):
        raise UserError(
            f"{vocab_file}: {len(vocab):,} tokens whose ids are not 0 to {len(vocab) - 1:,}; take GPT-2's own"
        )
    merges = []
    for number, line in enumerate(read_text(merges_file).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise UserError(
                f"{merges_file}, line {number}: found {line!r}, expected two tokens of {vocab_file.name} that make "
                "a third; take the original files"
            )
        merges.append(pair)
    if missing := [letter for letter in byte_letters().values() if letter not in vocab]:
        raise UserError(f"{vocab_file}: has no token for {len(missing)} of the 256 bytes, expected GPT-2's vocabulary")
    return byte_level(vocab, merges, {n: vocab[n] for n in ("<|endoftext|>",) if n in vocab}, None)


def _as_told(data: dict[str, Any], config: dict[str, Any], added: dict[str, int]) -> dict[str, Any]:
    """A `tokenizer.json` with what stands beside it: further tokens, and whether a text is given a blank to begin with.

    Args:
        config: `tokenizer_config.json`.
        added: `added_tokens.json`, token -> id.
    """
    tokens = {token["content"]: token for token in data.get("added_tokens") or []}
    told = {t["content"]: {"id": int(id), **t} for id, t in (config.get("added_tokens_decoder") or {}).items()}
    plain = {token["content"]: {**token, "special": False} for token in added_tokens(added)}
    more = {content: token for content, token in (plain | told).items() if content not in tokens}
    begins = data.get("pre_tokenizer") or {}
    if "add_prefix_space" in begins and isinstance(config.get("add_prefix_space"), bool):
        begins = {**begins, "add_prefix_space": config["add_prefix_space"]}
    every = sorted((tokens | more).values(), key=lambda token: token["id"])
    return {**data, "added_tokens": every, "pre_tokenizer": begins or None}


def _names(config: dict[str, Any], told: dict[str, dict[str, Any]], ids: dict[str, int]) -> dict[str, str]:
    """What special tokens are for; ids in the model's own settings say it where the tokenizer's do not."""
    tokens = {id: token for token, id in ids.items()}
    names: dict[str, str] = {}
    for role in _ROLES:
        name = _content(config.get(role)) or _content(told.get("special_tokens_map.json", {}).get(role))
        for file in ("generation_config.json", "config.json"):
            if name is None and role != "unk_token":
                id = told.get(file, {}).get(f"{role}_id")
                name = tokens.get(id[0] if isinstance(id, list) and id else id)  # type: ignore[arg-type]
        if name is not None and name in ids:
            names[role] = name
        elif name is not None and role == "eos_token":
            raise UserError(f"eos_token is {name!r}, which has no id; correct tokenizer_config.json")
    return names


def _content(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _marked(
    data: dict[str, Any], config: dict[str, Any], names: dict[str, str], ids: dict[str, int]
) -> list[dict[str, Any]]:
    """The added tokens, with those special that the settings call so (as `transformers` does when it loads them)."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    wanted = {*names.values(), *(_content(t) for t in (extra.values() if isinstance(extra, dict) else extra))}
    added = [{**t, "special": t.get("special") or t["content"] in wanted} for t in data.get("added_tokens") or []]
    known = {token["content"] for token in added}
    more = added_tokens({name: ids[name] for name in wanted if name in ids and name not in known})
    return sorted([*added, *more], key=lambda token: token["id"])


def _stops(told: dict[str, dict[str, Any]], vocab: int) -> list[int]:
    """Ids that end an answer, as the generation's settings say, else the model's."""
    for file in ("generation_config.json", "config.json"):
        if "eos_token_id" in (table := told.get(file, {})):
            found = table["eos_token_id"]
            ids = [] if found is None else found if isinstance(found, list) else [found]
            if not all(type(id) is int for id in ids):
                raise UserError(f"{file}: eos_token_id: found {found!r}, expected an id or a list of them; correct it")
            return sorted({id for id in ids if 0 <= id < vocab})
    return []


def _template(files: dict[str, Path], told: dict[str, dict[str, Any]], ids: dict[str, int]) -> str:
    """The directory's chat template, "" where it has none; ours comes back as `turns`."""
    source: Any = None
    if "chat_template.jinja" in files:
        source = read_text(files["chat_template.jinja"])
    for file in ("chat_template.json", "tokenizer_config.json"):
        source = source or told.get(file, {}).get("chat_template")
    if isinstance(source, list):
        source = next((t["template"] for t in source if t["name"] == "default"), None)
    if source == TURNS_JINJA and "<|end|>" in ids:
        return TURNS
    return source or ""


def _table(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: found a {type(data).__name__}, expected a JSON object; take the original file")
    return data
