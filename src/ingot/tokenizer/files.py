"""The files that a tokenizer stage reads in addition to its corpora, and their digest for the stage's key.

The parent process calls this for every recipe, so the module imports no tokenizer library.
"""

import json
import os
from pathlib import Path
from typing import Any

from ingot.core.artifact import digest_json, regular
from ingot.core.errors import MissingFile, UserError
from ingot.core.file_hashes import FileHashes
from ingot.tokenizer.settings import TokenizerSettings

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
VOCABULARIES = (
    ("tokenizer.json",),
    ("encoder.json", "vocab.bpe"),
    ("vocab.json", "merges.txt"),
    *((name,) for name in SENTENCEPIECE_FILES),
)
"""The files that a vocabulary can consist of. The first that are all in a directory are read."""
COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_UNSUPPORTED = {
    "sentencepiece.bpe.model": "a SentencePiece model whose ids change in code",
    "tekken.json": "Mistral's own format",
    "vocab.txt": "BERT's own format",
    "tokenizer.pkl": "a pickle, which would run code",
}


def tokenizer_files(path: Path) -> list[Path]:
    """The files that `import_tokenizer` reads.

    Args:
        path: a directory, or the `tokenizer.json` in it.

    Raises:
        UserError: the directory is missing, has no supported file, or has one that cannot be read.
    """
    directory = path.parent if path.name == "tokenizer.json" else path
    if not directory.is_dir():
        raise MissingFile(
            f"{path}: no such directory (relative to {Path.cwd()}), expected one with a tokenizer.json, GPT-2's "
            "encoder.json and vocab.bpe, or SentencePiece's tokenizer.model; check the path"
        )
    companions = [regular(directory / name) for name in COMPANION_FILES if os.path.lexists(directory / name)]
    for names in VOCABULARIES:
        if all(os.path.lexists(directory / name) for name in names):
            return [*(regular(directory / name) for name in names), *companions]
    unsupported = (f"{name} ({what})" for name, what in _UNSUPPORTED.items() if (directory / name).exists())
    raise UserError(
        f"{directory}: found {next(unsupported, 'none of them')}, expected tokenizer.json, encoder.json and "
        "vocab.bpe, vocab.json and merges.txt, or tokenizer.model; convert it to tokenizer.json (transformers: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
    )


def has_template(path: Path) -> bool:
    """Whether the tokenizer's files include a chat template. True for missing or invalid files, which fail later."""
    try:
        files = {file.name: file for file in tokenizer_files(path)}
        names = [name for name in ("chat_template.json", "tokenizer_config.json") if name in files]
        configs = [json.loads(read_text(files[name])) for name in names]
        if "chat_template.jinja" in files or any(isinstance(c, dict) and c.get("chat_template") for c in configs):
            return True
        tokenizer = json.loads(read_text(files["tokenizer.json"])) if "tokenizer.json" in files else {}
    except (UserError, ValueError, RecursionError):
        return True
    return not isinstance(tokenizer, dict) or bool(tokenizer.get("template"))  # the key of a tokenizer stage's file


def source_digest(settings: TokenizerSettings, hashes: FileHashes) -> str | None:
    """Digest of the vocabulary's files and the template file; None if the settings name neither.

    Raises:
        UserError: as `tokenizer_files`; also for a missing or invalid template.
    """
    files = tokenizer_files(settings.path) if settings.path else []
    template = settings.template_file
    if template and not template.is_file():
        where = f"'{template}' does not exist (relative to {Path.cwd()})"
        raise MissingFile(f"template: {where}, expected a file with a Jinja chat template; check the path")
    if template:
        _check_syntax(template)
    if not files and not template:
        return None
    return digest_json([[f.name, hashes.digest(f)] for f in files] + [hashes.digest(template) if template else None])


def _check_syntax(path: Path) -> None:
    from ingot.tokenizer.chat_template import Template  # imported late: few recipes need jinja2

    try:
        Template(read_text(path), {}, {}, frozenset())
    except UserError as error:
        raise UserError(f"template: '{path}': {error}") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; raises UserError for another encoding."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8, or copy it again") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises UserError if there is none."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: found a {type(data).__name__}, expected a JSON object; use the original file")
    return data
