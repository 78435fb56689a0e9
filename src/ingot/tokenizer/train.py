"""Trains a tokenizer in bounded memory, and reports measures of its vocabulary.

At most `sample_bytes` of text are in memory. From a larger corpus the pieces with the smallest content hashes are
sampled: evenly over the complete corpus, in one pass, and independently of a seed, since the vocabulary should not
change with the run's seed.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog, size
from ingot.corpus.documents import messages_of, read_documents, text_fields_of
from ingot.tokenizer import trainers
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, Char
from ingot.tokenizer.chat import check_template
from ingot.tokenizer.files import read_text
from ingot.tokenizer.hf_files import import_tokenizer
from ingot.tokenizer.hf_tokenizers import HFTokenizer, added_tokens, ids_of
from ingot.tokenizer.round_trip import counted_bytes
from ingot.tokenizer.settings import SPECIAL_TOKENS_MAP, SPECIALS, TURNS, TokenizerSettings
from ingot.tokenizer.vocabulary import REPORT_BYTES, describe

SourceText = tuple[str, str]
"""(name of the source, text)."""
PIECE_CHARACTERS = 1 << 20
"""Longer documents are sampled in pieces of this length, so that a book is not sampled completely or not at all."""
TRAINERS: dict[str, Callable[[TokenizerSettings, list[str], Display], Tokenizer]] = {
    "byte-bpe": trainers.byte_bpe,
    "sentencepiece-bpe": trainers.sentencepiece_bpe,
    "end-of-word-bpe": trainers.end_of_word_bpe,
    "unigram": trainers.unigram_model,
    "wordpiece": trainers.wordpiece_model,
    "word": trainers.word_model,
}
"""Type -> trainer on a sample. The type `char` reads all text, and `file` none."""


def train(
    settings: TokenizerSettings, texts: Iterable[SourceText], display: Display, log: EventLog
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a tokenizer on the texts of the train split, or import it from files.

    Returns:
        The tokenizer, and the report of `vocabulary.describe`.

    Raises:
        UserError: no text, too little text for the vocabulary size, a pattern that is invalid or skips text, or
            unreadable files.
    """
    tokenizer: Tokenizer
    if settings.type == "char":
        tokenizer, sample = _train_char(settings, texts, display)
    elif settings.type == "file":
        assert settings.path is not None
        tokenizer, sample = import_tokenizer(settings.path, display.notify), sample_texts(texts, REPORT_BYTES)
    else:
        sample = sample_texts(texts, settings.sample_bytes)
        if not sample:
            raise UserError("tokenizer: the train split contains no text; check its corpus")
        total = sum(len(text.encode()) for _, text in sample)
        unit = "words" if settings.vocab is None else f"{settings.vocab:,} tokens"
        display.notify(f"learning {unit} from {size(total)} of text")
        tokenizer = TRAINERS[settings.type](settings, [text for _, text in sample], display)
        for _, text in sample[:100]:
            counted_bytes(tokenizer, text, tokenizer.encode(text))  # refuses a pattern that skips text
    if settings.template_file:
        tokenizer = with_template(tokenizer, read_text(settings.template_file))
    elif settings.template == TURNS:
        tokenizer = with_template(tokenizer, TURNS)
    tokenizer.template_variables = _used_variables(settings, tokenizer.template)
    if settings.template_file:
        try:
            check_template(tokenizer)
        except UserError as error:
            raise UserError(f"{settings.template_file}: {error}") from None
    report = describe(tokenizer, sample_texts(sample, REPORT_BYTES), display)
    log.write("tokenizer", **report)
    return tokenizer, report


def training_texts(corpus_dir: Path, format: str = "text") -> Iterator[SourceText]:
    """The documents of the train split, or for other formats than `text` the messages in them."""
    for batch in read_documents(corpus_dir, "train", ["text", "source"]):
        for text, source in zip(batch["text"].to_pylist(), batch["source"].to_pylist(), strict=True):
            if format == "text":
                yield source, text
            else:
                for message in messages_of(json.loads(text)):
                    yield from ((source, message[name]) for name in text_fields_of(message))


def sample_texts(texts: Iterable[SourceText], limit: int) -> list[SourceText]:
    """An even sample of pieces in their original order, with at most `limit` UTF-8 bytes in total."""
    sample: list[tuple[int, int, int, SourceText]] = []  # a heap; the largest hash is at the top
    total = 0
    for order, (source, piece) in enumerate(_pieces(texts, min(PIECE_CHARACTERS, max(1, limit // 4)))):
        data = piece.encode()
        rank = -int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        heapq.heappush(sample, (rank, -order, len(data), (source, piece)))
        total += len(data)
        while total > limit:
            total -= heapq.heappop(sample)[2]
    return [source_text for _, _, _, source_text in sorted(sample, key=lambda entry: -entry[1])]


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with another chat format. For `turns`, missing special tokens are added to the vocabulary.

    Raises:
        UserError: type `char` or `word`, which have no special tokens.
    """
    if isinstance(tokenizer, HFTokenizer) and tokenizer.kind != "word":
        data, special_tokens_map = tokenizer.data, dict(tokenizer.special_tokens_map)
        if template == TURNS:
            missing = [name for name in SPECIALS if name not in ids_of(data)]
            added = added_tokens({name: tokenizer.vocab + n for n, name in enumerate(missing)})
            data = {**data, "added_tokens": [*(data.get("added_tokens") or []), *added]}
            special_tokens_map = {**SPECIAL_TOKENS_MAP, **special_tokens_map}
        return HFTokenizer(tokenizer.kind, data, special_tokens_map, template, tokenizer.stops)
    if isinstance(tokenizer, ByteBPE):
        return ByteBPE(tokenizer.tokens, tokenizer.pattern, template)
    raise UserError(
        f"template: a {tokenizer.kind} tokenizer has no special tokens to mark turns with; remove the setting"
    )


def _used_variables(settings: TokenizerSettings, template: str) -> dict[str, Any]:
    """The template's variables in the settings. Raises UserError for one that the template does not read."""
    for setting, names in (("date", ("strftime_now", "date_string")), ("enable_thinking", ("thinking",))):
        if getattr(settings, setting) is not None and not any(name in template for name in names):
            raise UserError(f"{setting}: the chat template reads no {' or '.join(names)}; remove the setting")
    return settings.template_variables


def _train_char(
    settings: TokenizerSettings, texts: Iterable[SourceText], display: Display
) -> tuple[Char, list[SourceText]]:
    """Read the alphabet from all text, because encoding a character that a sample misses would fail later."""
    characters: set[str] = set()
    sample: list[SourceText] = []
    sample_length = 0
    for source, text in texts:
        characters.update(text)
        if sample_length < REPORT_BYTES:
            sample.append((source, text))
            sample_length += len(text)
    if not characters:
        raise UserError("tokenizer: the train split contains no text; check its corpus")
    tokenizer = Char("".join(sorted(characters)) if settings.alphabet == "corpus" else None)
    display.notify(f"{len(characters):,} different characters, vocabulary {tokenizer.vocab:,}")
    return tokenizer, sample


def _pieces(texts: Iterable[SourceText], size: int) -> Iterator[SourceText]:
    for source, text in texts:
        for start in range(0, len(text), size):
            yield source, text[start : start + size]
