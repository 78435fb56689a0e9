"""Measures a tokenizer on text: compression by source and script, unused ids, and lost text.

Bytes per token are comparable across vocabularies, scripts and types, tokens per word (fertility) across languages. The
breakdown is by script and not by language, because a language cannot be recognised without a model.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.core.events import Display
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.vocab_size import nested

REPORT_BYTES = 8_000_000
"""Maximum size of the text that a report is measured on."""
TRADEOFF_CHARACTERS = 1_000_000
"""Approximate size of the text that smaller vocabularies are measured on."""
CHUNK_CHARACTERS = 4096
"""Minimum size of a chunk, which counts as one script; texts are split at line ends."""
_SCRIPTS = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}


@dataclass
class _Sum:
    """Totals over texts."""

    bytes: int = 0
    tokens: int = 0
    words: int = 0

    def add(self, text: str, tokens: int) -> None:
        self.bytes += len(text.encode())
        self.tokens += tokens
        self.words += len(text.split())

    def row(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "tokens": self.tokens,
            "bytes_per_token": self.bytes / max(self.tokens, 1),
            "tokens_per_word": self.tokens / max(self.words, 1),
        }


@dataclass
class _Counts:
    """The counts of a report."""

    total: _Sum = field(default_factory=_Sum)
    sources: dict[str, _Sum] = field(default_factory=dict)
    scripts: dict[str, _Sum] = field(default_factory=dict)
    unknown: int = 0
    """Number of unknown tokens."""
    changed: int = 0
    """Number of chunks that decoding does not restore."""
    chunks: int = 0


def describe(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], display: Display) -> dict[str, Any]:
    """Measure a tokenizer.

    Args:
        tokenizer: a tokenizer of any type.
        texts: (source, text) pairs.
        display: shows progress.

    Returns:
        `vocab`, `sample_bytes`, `bytes_per_token`, `tokens_per_word`, `unused_ids` (number of ordinary ids that do not
        occur), `by_source` and `by_script` (tables of the same measures), `longest_tokens` and `tradeoff` (see the
        functions). If text is lost, also `unknown_fraction` (of the tokens) and `changed_fraction` (of the chunks that
        decoding does not restore).
    """
    used, counts = np.zeros(tokenizer.vocab, dtype=bool), _Counts()
    with display.bar("measuring the vocabulary", total=sum(len(text) for _, text in texts), unit="characters") as bar:
        for source, text in texts:
            chunks = list(_chunks(text))
            for chunk, ids in zip(chunks, tokenizer.encode_batch(chunks), strict=True):
                used[ids] = True
                _add(counts, source, chunk, ids, tokenizer)
            bar.advance(len(text))
    ordinary = np.ones(tokenizer.vocab, dtype=bool)
    ordinary[list(tokenizer.specials.values())] = False
    total = counts.total.row()
    report: dict[str, Any] = {"vocab": tokenizer.vocab, "sample_bytes": total["bytes"]}
    if counts.total.tokens:
        report |= {name: total[name] for name in ("bytes_per_token", "tokens_per_word")}
        report["unused_ids"] = int((ordinary & ~used).sum())
        report["by_source"] = {name: sums.row() for name, sums in sorted(counts.sources.items())}
        report["by_script"] = {name: sums.row() for name, sums in _by_bytes(counts.scripts)}
        report["tradeoff"] = tradeoff(tokenizer, [text for _, text in texts])
    if not tokenizer.lossless and counts.chunks:
        report["changed_fraction"] = counts.changed / counts.chunks
        if tokenizer.unknown is not None:
            report["unknown_fraction"] = counts.unknown / max(counts.total.tokens, 1)
    if tokenizer.kind != "char":
        report["longest_tokens"] = longest_tokens(tokenizer)
    return report


def tradeoff(tokenizer: Tokenizer, texts: Iterable[str]) -> list[dict[str, Any]]:
    """Bytes per token of the tokenizer and of the smaller ones in `vocab_size.nested`, in ascending size."""
    sample: list[str] = []
    for text in texts:
        sample.append(text)
        if sum(map(len, sample)) >= TRADEOFF_CHARACTERS:
            break
    total = sum(len(text.encode()) for text in sample)
    rows = []
    for one in nested(tokenizer):
        tokens = sum(len(ids) for ids in one.encode_batch(sample))
        rows.append({"vocab": one.vocab, "bytes_per_token": total / max(tokens, 1)})
    return rows


def longest_tokens(tokenizer: Tokenizer, max_tokens: int = 10) -> list[str]:
    """The longest tokens without special tokens and blanks, the longest first."""
    special = set(tokenizer.specials.values())
    ordinary = (tokenizer.token_bytes(id) for id in range(tokenizer.vocab) if id not in special)
    by_length = sorted((token for token in ordinary if token.strip()), key=lambda token: (-len(token), token))
    return [token.decode("utf-8", errors="replace") for token in by_length[:max_tokens]]


def script(text: str) -> str:
    """The script of the most letters in the text; `none` without letters."""
    counts: Counter[str] = Counter()
    for letter, times in Counter(text).items():
        if letter.isalpha():
            name = unicodedata.name(letter, "other").split(" ")[0].split("-")[0]
            counts[_SCRIPTS.get(name, name.capitalize())] += times
    return max(counts, key=lambda name: (counts[name], name)) if counts else "none"


def _add(counts: _Counts, source: str, chunk: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    for sums in (
        counts.total,
        counts.sources.setdefault(source, _Sum()),
        counts.scripts.setdefault(script(chunk), _Sum()),
    ):
        sums.add(chunk, len(ids))
    counts.chunks += 1
    if not tokenizer.lossless:
        counts.changed += tokenizer.decode(ids) != chunk
        counts.unknown += 0 if tokenizer.unknown is None else int(np.count_nonzero(ids == tokenizer.unknown))


def _by_bytes(sums: dict[str, _Sum]) -> list[tuple[str, _Sum]]:
    return sorted(sums.items(), key=lambda item: (-item[1].bytes, item[0]))


def _chunks(text: str) -> Iterator[str]:
    """Split a text at line ends into chunks of at least `CHUNK_CHARACTERS` (except the last)."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= CHUNK_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)
