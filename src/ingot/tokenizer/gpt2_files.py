"""Reads the two files of GPT-2's tokenizer (`encoder.json` + `vocab.bpe`, or `vocab.json` + `merges.txt`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.core.errors import UserError
from ingot.tokenizer.files import read_object, read_text
from ingot.tokenizer.hf_decoders import byte_letters
from ingot.tokenizer.hf_tokenizers import added_tokens


def read_gpt2(vocab_file: Path, merges_file: Path, class_name: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The two files of GPT-2.

    Args:
        vocab_file: JSON, token -> id.
        merges_file: a merge a line.
        class_name: `tokenizer_class` of `tokenizer_config.json`, if it has one.

    Returns:
        The content of `tokenizer.json`, and the special token of each role.

    Raises:
        UserError: another class, whose way to split text the files do not define, or files that do not fit each other.
    """
    if class_name and class_name.removesuffix("Fast") != "GPT2Tokenizer":
        raise UserError(
            f"{vocab_file.parent}: found {vocab_file.name} and {merges_file.name} of a {class_name}, expected GPT-2's, "
            "because these files do not define how other classes split text; convert the tokenizer to tokenizer.json"
        )
    vocab: dict[str, int] = read_object(vocab_file)
    if sorted(map(str, vocab.values())) != sorted(map(str, range(len(vocab)))):
        raise UserError(
            f"{vocab_file}: the ids of {len(vocab):,} tokens are not 0 to {len(vocab) - 1:,}; use GPT-2's original file"
        )
    merges = []
    for number, line in enumerate(read_text(merges_file).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise UserError(
                f"{merges_file}, line {number}: found {line!r}, expected two tokens of {vocab_file.name} whose "
                "concatenation is a third; use the original files"
            )
        merges.append(pair)
    if missing := [letter for letter in byte_letters().values() if letter not in vocab]:
        raise UserError(f"{vocab_file}: has no token for {len(missing)} of the 256 bytes, expected GPT-2's vocabulary")
    end = "<|endoftext|>"
    data = byte_level_bpe(vocab, merges, {end: vocab[end]} if end in vocab else {}, None)
    return data, {"eos_token": end, "bos_token": end}


def byte_level_bpe(
    vocab: dict[str, int], merges: list[list[str]], specials: Mapping[str, int], pattern: str | None
) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level BPE. Pattern None means GPT-2's."""
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
