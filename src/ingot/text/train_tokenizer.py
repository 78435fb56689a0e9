"""Learn a vocabulary from text, in bounded memory and with a report of what was learned.

At most `sample_bytes` of text are held. When the corpus has more, the pieces with the smallest content hashes are kept:
an even sample of the whole corpus in one pass, which depends neither on a seed nor on where a source starts.

Rejected: the first `sample_bytes` of the corpus (the first source then owns the vocabulary), and a seed (a vocabulary
is an input of everything after it and should not change with the run's seed).
"""

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rustbpe

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus.documents import iter_texts, messages_of
from ingot.text.settings import SPECIALS, TokenizerSettings
from ingot.text.tokenizer import ByteBPE, Char, Tokenizer

PIECE = 1 << 20
"""Longer documents are sampled in pieces of this many characters, so that one book cannot be all or nothing."""
REPORT_BYTES = 8_000_000


def train(
    settings: TokenizerSettings, texts: Iterable[str], display: Display, log: EventLog
) -> tuple[Tokenizer, dict[str, Any]]:
    """Learn a tokenizer from the texts of the train split.

    Returns:
        the tokenizer, and a report: `vocab`, `sample_bytes`, `bytes_per_token`, `unused_ids` (ordinary ids that a
        sample of the text never needs) and `longest_tokens` (blanks left out).

    Raises:
        UserError: no text, too little text for the vocabulary, or a pattern that is invalid or skips text.
    """
    tokenizer: Tokenizer
    if settings.type == "char":
        tokenizer, sample = _train_char(settings, texts, display)
    else:
        assert settings.vocab is not None
        sample = sample_texts(texts, settings.sample_bytes)
        learned_from = sum(len(text.encode()) for text in sample)
        display.say(f"learning {settings.vocab:,} tokens from {learned_from:,} bytes of text")
        tokenizer = _train_bpe(settings.vocab, settings.pattern, settings.template, sample)
    report = describe(tokenizer, sample)
    log.write("tokenizer", **report)
    return tokenizer, report


def training_texts(corpus_dir: Path, format: str = "text") -> Iterator[str]:
    """What a tokenizer learns from: the documents of the train split, or the messages in them."""
    for text in iter_texts(corpus_dir, "train"):
        if format == "text":
            yield text
        else:
            yield from (message["content"] for message in messages_of(json.loads(text)))


def sample_texts(texts: Iterable[str], limit: int) -> list[str]:
    """Pieces of at most `limit` UTF-8 bytes in all, evenly from all texts, in their order."""
    kept: list[tuple[int, int, int, str]] = []  # a heap whose top has the largest hash
    total = 0
    for order, piece in enumerate(_pieces(texts, min(PIECE, max(1, limit // 4)))):
        data = piece.encode()
        rank = -int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        heapq.heappush(kept, (rank, -order, len(data), piece))
        total += len(data)
        while total > limit:
            total -= heapq.heappop(kept)[2]
    return [piece for _, _, _, piece in sorted(kept, key=lambda entry: -entry[1])]


def describe(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any]:
    """What a vocabulary does to text, measured on the first `REPORT_BYTES` of `texts`."""
    used = np.zeros(tokenizer.vocab, dtype=bool)
    total = tokens = 0
    for text in texts:
        ids = tokenizer.encode(text)
        used[ids] = True
        total += len(text.encode())
        tokens += len(ids)
        if total >= REPORT_BYTES:
            break
    ordinary = tokenizer.vocab - len(tokenizer.specials)
    report: dict[str, Any] = {
        "vocab": tokenizer.vocab,
        "sample_bytes": total,
        "bytes_per_token": total / max(tokens, 1),
        "unused_ids": int(ordinary - used[:ordinary].sum()),
    }
    if isinstance(tokenizer, ByteBPE):
        words = (token for token in tokenizer.tokens if token.strip())
        longest = sorted(words, key=lambda token: (-len(token), token))[:10]
        report["longest_tokens"] = [token.decode("utf-8", errors="replace") for token in longest]
    return report


def _train_char(settings: TokenizerSettings, texts: Iterable[str], display: Display) -> tuple[Char, list[str]]:
    """The alphabet comes from all of the text: a character that a sample missed would be an error later."""
    seen: set[str] = set()
    sample: list[str] = []
    held = 0
    for text in texts:
        seen.update(text)
        if held < REPORT_BYTES:
            sample.append(text)
            held += len(text)
    if not seen:
        raise UserError("tokenizer: the train split has no text to take an alphabet from; check the corpus it reads")
    tokenizer = Char("".join(sorted(seen)) if settings.alphabet == "corpus" else None)
    display.say(f"{len(seen):,} different characters, vocabulary {tokenizer.vocab:,}")
    return tokenizer, sample


def _train_bpe(vocab: int, pattern: str, template: str, texts: list[str]) -> ByteBPE:
    if not texts:
        raise UserError("tokenizer: the train split has no text to learn from; check the corpus it reads")
    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
    try:
        trainer.train_from_iterator(iter(texts), vocab - len(SPECIALS), pattern=pattern)
    except ValueError as error:
        raise UserError(f"tokenizer pattern {pattern!r}: {error}; mend the expression") from None
    except BaseException as error:  # a Rust panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer pattern {pattern!r}: {error}; bound its repetitions") from None
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    if len(tokens) + len(SPECIALS) < vocab:
        total = sum(len(text.encode()) for text in texts)
        raise UserError(
            f"tokenizer: vocab = {vocab:,}, but {total:,} bytes of text only give {len(tokens) + len(SPECIALS):,} "
            "(256 bytes, their merges and the special tokens); lower vocab or add text"
        )
    tokenizer = ByteBPE(tokens, pattern, template)
    for text in texts[:100]:
        check_lossless(tokenizer, text, tokenizer.encode(text))
    return tokenizer


def check_lossless(tokenizer: Tokenizer, text: str, ids: np.ndarray) -> int:
    """The UTF-8 bytes of `text`; raises UserError where ids do not spell all of it (a pattern that skips text)."""
    expected, found = len(text.encode("utf-8", "surrogatepass")), tokenizer.spelled_bytes(ids)
    if found != expected:
        raise UserError(
            f"tokenizer pattern: ids spell {found:,} of {expected:,} bytes of a text, because the pattern matches no "
            "more of it; make it match every character (end it with |\\s|.)"
        )
    return expected


def _pieces(texts: Iterable[str], size: int) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), size):
            yield text[start : start + size]
