"""Which files a tokenizer stage reads besides its corpora, and their digest, which is part of the stage's key.

The parent process asks this for every recipe, so no library is loaded here.
"""

import json
from pathlib import Path

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import MissingFile, UserError
from ingot.tokenizer.settings import TokenizerSettings

GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_FOREIGN = {
    "tokenizer.model": "a SentencePiece model",
    "spiece.model": "a SentencePiece model",
    "tekken.json": "Mistral's own format",
    "vocab.txt": "BERT's own format",
    "tokenizer.pkl": "a pickle, which would run code",
}


def tokenizer_files(path: Path) -> list[Path]:
    """The files that `import_tokenizer` reads.

    Args:
        path: a directory, or the `tokenizer.json` in it.

    Raises:
        UserError: nothing there that can be read.
    """
    directory = path.parent if path.name == "tokenizer.json" else path
    if not directory.is_dir():
        raise MissingFile(
            f"{path}: no such directory (looked from {Path.cwd()}), expected one with a tokenizer.json or GPT-2's "
            "encoder.json and vocab.bpe; check the path"
        )
    beside = [directory / name for name in BESIDE if (directory / name).is_file()]
    if (directory / "tokenizer.json").is_file():
        return [directory / "tokenizer.json", *beside]
    for names in GPT2_FILES:
        if all((directory / name).is_file() for name in names):
            return [*(directory / name for name in names), *beside]
    found = next((f"{name} ({what})" for name, what in _FOREIGN.items() if (directory / name).exists()), "none of them")
    raise UserError(
        f"{directory}: found {found}, expected tokenizer.json, or encoder.json and vocab.bpe, or vocab.json and "
        "merges.txt; save it once as tokenizer.json (transformers does: AutoTokenizer ... save_pretrained)"
    )


def has_template(path: Path) -> bool:
    """Whether there is a chat template among the files of a tokenizer; True where that is not for us to say, since they
    are not there or cannot be read.
    """
    try:
        files = {file.name: file for file in tokenizer_files(path)}
        told = [json.loads(read_text(files[n])) for n in ("chat_template.json", "tokenizer_config.json") if n in files]
        if "chat_template.jinja" in files or any(isinstance(t, dict) and t.get("chat_template") for t in told):
            return True
        own = json.loads(read_text(files["tokenizer.json"])) if "tokenizer.json" in files else {}
    except (UserError, ValueError):
        return True
    return not isinstance(own, dict) or bool(own.get("template"))  # as stages keep it


def source_digest(settings: TokenizerSettings, hashes: FileHashes) -> str | None:
    """Digest of a vocabulary's files and of a template's file; None where the settings name none.

    Raises:
        UserError: as `tokenizer_files`; also for a template that is not there, or that cannot be parsed.
    """
    files = tokenizer_files(settings.path) if settings.path else []
    template = settings.template_file
    if template and not template.is_file():
        where = f"'{template}' does not exist (looked from {Path.cwd()})"
        raise MissingFile(f"template: {where}, expected a file with a Jinja chat template; check the path")
    if template:
        _check_syntax(template)
    if not files and not template:
        return None
    return digest_json([[f.name, hashes.digest(f)] for f in files] + [hashes.digest(template) if template else None])


def _check_syntax(path: Path) -> None:
    from ingot.tokenizer.chat_template import Template  # reads jinja2, which few recipes need

    try:
        Template(read_text(path), {}, {}, frozenset())
    except UserError as error:
        raise UserError(f"template: '{path}': {error}") from None


def read_text(path: Path) -> str:
    """A file's text; raises UserError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; copy the file again") from None
