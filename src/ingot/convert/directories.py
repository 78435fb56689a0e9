"""The files in the directory of a Hugging Face model or of a PEFT adapter: read, refused, or not used. No torch.

Of two sets of weights in one directory, tools choose different ones, so both are refused.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ingot.core.artifact import regular
from ingot.core.errors import MissingFile, UserError
from ingot.model.adapter_config import PEFT_FILES
from ingot.tokenizer.files import COMPANION_FILES, VOCABULARIES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLED = re.compile(r"(pytorch_model|adapter_model)(-\d+-of-\d+)?\.bin(\.index\.json)?")
_MAX_NAMES = 20
"""Most names in a message."""


def model_weights(directory: Path) -> list[Path]:
    """The weight files of a model: one safetensors file, or those in its index.

    Raises:
        UserError: no safetensors, two sets of weights, or an index that does not fit the files.
    """
    names = _names(directory)
    shards = _shards(directory) if INDEX in names else []
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    sets = [name for name in (SINGLE, INDEX) if name in names and name not in shards]
    if not sets and pickled:
        raise UserError(
            f"{directory}: found {pickled[0]}, expected {SINGLE}, because pickled weights run code when they are "
            "loaded; convert them to safetensors, or use a revision of the model that has them"
        )
    if not sets:
        others = "".join(f", found {name}" for name in names if name.endswith(".safetensors"))
        raise UserError(
            f"{directory}: no {SINGLE} and no {INDEX}{others}, expected the weights of a Hugging Face model"
        )
    sets += [name for name in names if _SHARD.fullmatch(name) and name not in shards][:1] + pickled[:1]
    if len(sets) > 1:
        raise UserError(
            f"{directory}: found two sets of weights, {sets[0]} and {sets[1]}, expected one, because tools differ in "
            "which they load; move the other one away"
        )
    return [regular(directory / name) for name in shards or [SINGLE]]


def adapter_files(directory: Path) -> list[Path]:
    """The configuration and the weights of an adapter.

    Raises:
        MissingFile: one does not exist.
        UserError: there are pickled weights, or one is no regular file.
    """
    names = _names(directory)
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled and PEFT_FILES[1] in names:
        raise UserError(
            f"{directory}: found two sets of weights, {PEFT_FILES[1]} and {pickled[0]}, expected one; move the other "
            "one away"
        )
    if pickled:
        raise UserError(
            f"{directory}: found {pickled[0]}, expected {PEFT_FILES[1]}, because pickled weights run code when they "
            "are loaded; save the adapter with safe_serialization=True"
        )
    if not set(PEFT_FILES) <= set(names):
        raise MissingFile(
            f"{directory}: found {listed(names)}, expected {' and '.join(PEFT_FILES)}, as PEFT writes them"
        )
    return [regular(directory / name) for name in PEFT_FILES]


def own_tokenizer(directory: Path) -> bool:
    """Whether there is a complete tokenizer."""
    return bool(_vocabulary(directory))


def not_used(directory: Path, used: Iterable[Path]) -> list[str]:
    """Names of the files and directories that an import does not read; those of directories end in a slash.

    Args:
        directory: a model's or an adapter's directory.
        used: the files that are read, besides those of a tokenizer.
    """
    vocabulary = _vocabulary(directory)
    tokenizer = (*vocabulary, *COMPANION_FILES) if vocabulary else ()
    read = {INDEX, *tokenizer, *(file.name for file in used)}
    return [f"{name}/" if (directory / name).is_dir() else name for name in _names(directory) if name not in read]


def _vocabulary(directory: Path) -> tuple[str, ...]:
    """The files of the vocabulary that an import reads; none without a complete tokenizer."""
    names = set(_names(directory))
    return next((files for files in VOCABULARIES if set(files) <= names), ())


def listed(names: list[str]) -> str:
    """The names for a message; a long list is cut."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "nothing") + more


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if not file.name.startswith("."))


def _shards(directory: Path) -> list[str]:
    """The files that the index of a model names."""
    index = regular(directory / INDEX)
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index}: found no weight_map from names to files; download it again") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise UserError(f"{index}: names the file {name}, which is not in {directory}; download it again")
    if not names:
        raise UserError(f"{index}: names no file, expected the files of the weights; download it again")
    return names
