"""The kinds `tokenizer`, `tokens` and `token-files`: a vocabulary, and documents encoded with it, here or elsewhere."""

from typing import Any

from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.tokenize.settings import TokenFilesSettings, files_digest
from ingot.tokenizer.files import has_template, source_digest
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings

_SOURCES = ("tokenizer", "store", "stages/tokenize")
_WITHOUT_TURNS = ("char", "word")
"""Tokenizer types without special tokens for the turns of a conversation."""


def check_turns(corpus: str, form: str, tokenizer: Node, setting: str, resolve: Resolve) -> None:
    """Raise a UserError for a corpus of conversations whose tokenizer cannot mark turns.

    Args:
        corpus: name of the corpus.
        form: its format.
        tokenizer: the tokenizer stage.
        setting: the setting that combines them, for errors.
        resolve: the resolver of the stage with that setting.
    """
    settings = tokenizer.settings
    assert isinstance(settings, TokenizerSettings)
    if form == "text":
        return
    if settings.type in _WITHOUT_TURNS:
        resolve.refuse(
            setting,
            f"'{corpus}' has format = \"{form}\", but '{tokenizer.name}' is of type {settings.type}, which has no "
            'special tokens to mark turns with; use type = "byte-bpe"',
        )
    if settings.path and not settings.template and not has_template(settings.path):
        resolve.refuse(
            setting,
            f"'{corpus}' has format = \"{form}\", but {settings.path} has no chat template; add a stage of kind "
            f'tokenizer (type = "file", path = "{settings.path}", template = "turns") and name it as the `tokenizer` '
            "of a stage of kind import",
        )


def _tokenizer_reads(settings: TokenizerSettings, resolve: Resolve) -> dict[str, Node]:
    return {f"corpus:{name}": resolve.stage(name, "from", "documents") for name in settings.source}


def _tokenizer_facts(settings: TokenizerSettings) -> dict[str, Any]:
    return {"type": settings.type} | ({"vocab": settings.vocab} if settings.vocab else {})


TOKENIZER = Kind(
    TokenizerSettings,
    5,
    "ingot.stages.tokenize.build:tokenizer",
    _SOURCES,
    makes="tokenizer",
    reads=_tokenizer_reads,
    facts=_tokenizer_facts,
    raw=source_digest,
    panel="ingot.report.html.panels_tokenizer:tokenizer",
)
TOKENS = Kind(
    TokensSettings,
    6,
    "ingot.stages.tokenize.build:tokens",
    _SOURCES,
    makes="tokens",
    panel="ingot.report.html.panels:tokens",
)
TOKEN_FILES = Kind(
    TokenFilesSettings,
    1,
    "ingot.stages.tokenize.build:token_files",
    _SOURCES,
    makes="tokens",
    raw=files_digest,
    panel="ingot.report.html.panels:tokens",
)
