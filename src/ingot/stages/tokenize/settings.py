"""Settings of the kind `token-files`."""

import glob
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ingot.core.artifact import digest_json
from ingot.core.errors import MissingFile
from ingot.core.file_hashes import FileHashes
from ingot.core.settings import EXECUTION, Settings, Stage
from ingot.store.token_formats import TokenFormat, files_beside


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TokenFilesSettings(Settings):
    """Kind `token-files`: token ids that another tool has written, as data to train on."""

    tokenizer: Annotated[str, Stage("tokenizer")]
    """The tokenizer stage with the vocabulary of the files."""
    format: TokenFormat
    """`nanogpt` (.bin), `llm.c` (.bin), `megatron` (.bin and .idx) or `datatrove` (.ds, .ds.index, .ds.metadata)."""
    train: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1), EXECUTION]
    """Files of the training split, or globs; one or a list. Their content is part of the key, their names are not."""
    val: Annotated[list[str], BeforeValidator(_as_list), EXECUTION] = Field(default_factory=list)
    """Files of the held-out split, or globs. Default: nothing is held out."""

    def files(self) -> dict[str, list[Path]]:
        """The files of each split in order. Raises MissingFile for a pattern without any."""
        return {split: [f for p in patterns for f in _expand(split, p)] for split, patterns in self._patterns()}

    def _patterns(self) -> list[tuple[str, list[str]]]:
        return [("train", self.train), ("val", self.val)]


def _expand(split: str, pattern: str) -> list[Path]:
    names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    if not names or not all(Path(name).is_file() for name in names):
        raise MissingFile(
            f"{split}: found no file '{pattern}' (relative to {Path.cwd()}), expected token ids; check the path"
        )
    return [Path(name) for name in names]


def files_digest(settings: TokenFilesSettings, hashes: FileHashes) -> str:
    """Digest of the files and of those beside them. Raises MissingFile as `files`."""

    def digests(file: Path) -> list[str]:
        return [hashes.digest(f) for f in (file, *files_beside(file, settings.format)) if f.is_file()]

    return digest_json({split: [digests(file) for file in files] for split, files in settings.files().items()})
