"""Learn a vocabulary from text, in bounded memory and with a report of what was learned.

At most `sample_bytes` of text are held. When the corpus has more, the pieces with the smallest content hashes are kept:
an even sample of the whole corpus in one pass, which depends neither on a seed nor on where a source starts.

Rejected: the first `sample_bytes` of the corpus (the first source then owns the vocabulary), and a seed (a vocabulary
is an input of everything after it and should not change with the run's seed).
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus.documents import messages_of, read_documents
from ingot.tokenizer import trainers
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, Char
from ingot.tokenizer.chat import check_template
from ingot.tokenizer.files import read_text
from ingot.tokenizer.hf_files import import_tokenizer
from ingot.tokenizer.hf_tokenizers import LibraryTokenizer, added_tokens, ids_of
from ingot.tokenizer.settings import ROLES_OF_SPECIALS, SPECIALS, TURNS, TokenizerSettings
from ingot.tokenizer.vocabulary import REPORT_BYTES, describe

Labelled = tuple[str, str]
"""A source's name and a text of it."""
PIECE = 1 << 20
"""Longer documents are sampled in pieces of this many characters, so that one book cannot be all or nothing."""
TRAINERS: dict[str, Callable[[TokenizerSettings, list[str], Display], Tokenizer]] = {
    "byte-bpe": trainers.byte_bpe,
    "sentencepiece-bpe": trainers.sentencepiece_bpe,
    "unigram": trainers.unigram_model,
    "wordpiece": trainers.wordpiece_model,
    "word": trainers.word_model,
}
"""Type -> what learns it from a sample; a `char` reads all of the text, and a `file` none."""


def train(
    settings: TokenizerSettings, texts: Iterable[Labelled], display: Display, log: EventLog
) -> tuple[Tokenizer, dict[str, Any]]:
    """Learn a tokenizer from the texts of the train split, or take it from files.

    Returns:
        the tokenizer, and the report of `vocabulary.describe`.

    Raises:
        UserError: no text, too little text for the vocabulary, a pattern that is invalid or skips text, or files that
            cannot be read.
    """
    tokenizer: Tokenizer
    if settings.type == "char":
        tokenizer, sample = _train_char(settings, texts, display)
    elif settings.type == "file":
        assert settings.path is not None
        tokenizer, sample = import_tokenizer(settings.path), sample_texts(texts, REPORT_BYTES)
    else:
        sample = sample_texts(texts, settings.sample_bytes)
        if not sample:
            raise UserError("tokenizer: the train split has no text to learn from; check the corpus it reads")
        learned_from = sum(len(text.encode()) for _, text in sample)
        wanted = "words" if settings.vocab is None else f"{settings.vocab:,} tokens"
        display.say(f"learning {wanted} from {learned_from:,} bytes of text")
        tokenizer = TRAINERS[settings.type](settings, [text for _, text in sample], display)
        for _, text in sample[:100]:
            check_lossless(tokenizer, text, tokenizer.encode(text))
    if settings.template_file:
        tokenizer = with_template(tokenizer, read_text(settings.template_file))
        try:
            check_template(tokenizer)
        except UserError as error:
            raise UserError(f"{settings.template_file}: {error}") from None
    elif settings.template == TURNS:
        tokenizer = with_template(tokenizer, TURNS)
    report = describe(tokenizer, sample_texts(sample, REPORT_BYTES), display)
    log.write("tokenizer", **report)
    return tokenizer, report


def training_texts(corpus_dir: Path, format: str = "text") -> Iterator[Labelled]:
    """What a tokenizer learns from: the documents of the train split, or the messages in them."""
    for batch in read_documents(corpus_dir, "train", ["text", "source"]):
        for text, source in zip(batch["text"].to_pylist(), batch["source"].to_pylist(), strict=True):
            if format == "text":
                yield source, text
            else:
                yield from ((source, message["content"]) for message in messages_of(json.loads(text)))


def sample_texts(texts: Iterable[Labelled], limit: int) -> list[Labelled]:
    """Pieces of at most `limit` UTF-8 bytes in all, evenly from all texts, in their order."""
    kept: list[tuple[int, int, int, Labelled]] = []  # a heap whose top has the largest hash
    total = 0
    for order, (source, piece) in enumerate(_pieces(texts, min(PIECE, max(1, limit // 4)))):
        data = piece.encode()
        rank = -int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        heapq.heappush(kept, (rank, -order, len(data), (source, piece)))
        total += len(data)
        while total > limit:
            total -= heapq.heappop(kept)[2]
    return [labelled for _, _, _, labelled in sorted(kept, key=lambda entry: -entry[1])]


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer with another chat format; for `turns`, files get what they lack of its special tokens.

    Raises:
        UserError: characters or words, which have no special tokens.
    """
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.kind != "word":
        data, names = tokenizer.data, dict(tokenizer.names)
        if template == TURNS:
            lacking = [name for name in SPECIALS if name not in ids_of(data)]
            added = added_tokens({name: tokenizer.vocab + n for n, name in enumerate(lacking)})
            data = {**data, "added_tokens": [*(data.get("added_tokens") or []), *added]}
            names = {**ROLES_OF_SPECIALS, **names}
        return LibraryTokenizer(tokenizer.kind, data, names, template, tokenizer.stops)
    if isinstance(tokenizer, ByteBPE):
        return ByteBPE(tokenizer.tokens, tokenizer.pattern, template)
    raise UserError(
        f"template: a {tokenizer.kind} tokenizer has no special tokens to mark turns with; remove the setting"
    )


def _train_char(
    settings: TokenizerSettings, texts: Iterable[Labelled], display: Display
) -> tuple[Char, list[Labelled]]:
    """The alphabet comes from all of the text: a character that a sample missed would be an error later."""
    seen: set[str] = set()
    sample: list[Labelled] = []
    held = 0
    for source, text in texts:
        seen.update(text)
        if held < REPORT_BYTES:
            sample.append((source, text))
            held += len(text)
    if not seen:
        raise UserError("tokenizer: the train split has no text to take an alphabet from; check the corpus it reads")
    tokenizer = Char("".join(sorted(seen)) if settings.alphabet == "corpus" else None)
    display.say(f"{len(seen):,} different characters, vocabulary {tokenizer.vocab:,}")
    return tokenizer, sample


def check_lossless(tokenizer: Tokenizer, text: str, ids: np.ndarray) -> int:
    """How many UTF-8 bytes of `text` its ids spell: all, or a UserError (a pattern that skips text).

    A tokenizer that is not lossless by its kind (words, normalised text) passes: its report says what is lost, and what
    it does not know counts for nothing, so that bits per byte do not flatter it.
    """
    expected, found = len(text.encode("utf-8", "surrogatepass")), tokenizer.spelled_bytes(ids)
    if tokenizer.lossless and found != expected:
        raise UserError(
            f"tokenizer pattern: ids spell {found:,} of {expected:,} bytes of a text, because the pattern matches no "
            "more of it; make it match every character (end it with |\\s|.)"
        )
    return min(found, expected)


def _pieces(texts: Iterable[Labelled], size: int) -> Iterator[Labelled]:
    for source, text in texts:
        for start in range(0, len(text), size):
            yield source, text[start : start + size]
