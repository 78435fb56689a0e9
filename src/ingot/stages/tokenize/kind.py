"""The kinds `tokenizer` and `tokens`: a vocabulary, and documents encoded with it."""

from typing import Any

from ingot.stages.kind import Kind, Node, Resolve
from ingot.tokenizer.files import has_template, source_digest
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings

_SOURCES = ("tokenizer", "store", "stages/tokenize")
_WITHOUT_TURNS = ("char", "word")
"""Tokenizer types that cannot mark who speaks."""


def check_turns(corpus: str, form: str, tokenizer: Node, setting: str, resolve: Resolve) -> None:
    """Refuse conversations for a tokenizer that cannot mark turns."""
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
            f"'{corpus}' has format = \"{form}\", but {settings.path} has no chat template: make a stage of its "
            f'tokenizer (type = "file", path = "{settings.path}", template = "turns") and name it as the `tokenizer` '
            "of a stage of kind import",
        )


def _tokenizer_reads(settings: TokenizerSettings, resolve: Resolve) -> dict[str, Node]:
    return {f"corpus:{name}": resolve.stage(name, "from", "documents") for name in settings.source}


def _tokenizer_facts(settings: TokenizerSettings) -> dict[str, Any]:
    return {"type": settings.type} | ({"vocab": settings.vocab} if settings.vocab else {})


TOKENIZER = Kind(
    TokenizerSettings,
    4,
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
    5,
    "ingot.stages.tokenize.build:tokens",
    _SOURCES,
    makes="tokens",
    panel="ingot.report.html.panels:tokens",
)
