"""What a vocabulary does to text: how long it gets, by source and by script, what it never needs, what it loses.

Bytes per token compare across vocabularies, scripts and types, tokens per word (fertility) across languages. Scripts
are what can be told of a text without a model: `Latin` is English and Turkish alike, and it is called a script.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.core.events import Display
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.vocab_size import smaller

REPORT_BYTES = 8_000_000
"""Text that a report is measured on."""
TRADEOFF_BYTES = 1_000_000
"""Text that smaller vocabularies are measured on."""
CHUNK = 4096
"""Characters that are told to be of one script; a text is cut at line ends."""
_SCRIPTS = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}


@dataclass
class _Sum:
    """What texts of one label came to."""

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
    """What a report sums up."""

    whole: _Sum = field(default_factory=_Sum)
    sources: dict[str, _Sum] = field(default_factory=dict)
    scripts: dict[str, _Sum] = field(default_factory=dict)
    unknown: int = 0
    changed: int = 0
    chunks: int = 0


def describe(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], display: Display) -> dict[str, Any]:
    """Measure a vocabulary.

    Args:
        tokenizer: any type.
        texts: (source, text) pairs.
        display: shows progress.

    Returns:
        `vocab`, `sample_bytes`, `bytes_per_token`, `tokens_per_word`, `unused_ids` (ordinary ids that these texts never
        need), `by_source` and `by_script` (tables of the same measures), `longest_tokens` (blanks left out), `tradeoff`
        (bytes per token of the smaller vocabularies that this one holds); and where text is lost, `unknown_share` of
        the tokens and `changed_share` of the texts that do not come back as they were.
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
    total = counts.whole.row()
    report: dict[str, Any] = {"vocab": tokenizer.vocab, "sample_bytes": total["bytes"]}
    if counts.whole.tokens:
        report |= {name: total[name] for name in ("bytes_per_token", "tokens_per_word")}
        report["unused_ids"] = int((ordinary & ~used).sum())
        report["by_source"] = {name: found.row() for name, found in sorted(counts.sources.items())}
        report["by_script"] = {name: found.row() for name, found in _by_bytes(counts.scripts)}
        report["tradeoff"] = tradeoff(tokenizer, [text for _, text in texts])
    if not tokenizer.lossless and counts.chunks:
        report["changed_share"] = counts.changed / counts.chunks
        if tokenizer.unknown is not None:
            report["unknown_share"] = counts.unknown / max(counts.whole.tokens, 1)
    if tokenizer.kind != "char":
        report["longest_tokens"] = longest_tokens(tokenizer)
    return report


def tradeoff(tokenizer: Tokenizer, texts: Iterable[str]) -> list[dict[str, Any]]:
    """Bytes per token at this vocabulary and at every smaller one that it holds, smallest first."""
    held: list[str] = []
    for text in texts:
        held.append(text)
        if sum(map(len, held)) >= TRADEOFF_BYTES:
            break
    total = sum(len(text.encode()) for text in held)
    rows = []
    for one in smaller(tokenizer):
        tokens = sum(len(ids) for ids in one.encode_batch(held))
        rows.append({"vocab": one.vocab, "bytes_per_token": total / max(tokens, 1)})
    return rows


def longest_tokens(tokenizer: Tokenizer, most: int = 10) -> list[str]:
    """The longest ordinary tokens that are no blanks."""
    special = set(tokenizer.specials.values())
    spelled = (tokenizer.token_bytes(id) for id in range(tokenizer.vocab) if id not in special)
    found = sorted((token for token in spelled if token.strip()), key=lambda token: (-len(token), token))
    return [token.decode("utf-8", errors="replace") for token in found[:most]]


def script(text: str) -> str:
    """The script that most letters of a text are in; `none` where there are no letters."""
    found: Counter[str] = Counter()
    for letter, times in Counter(text).items():
        if letter.isalpha():
            name = unicodedata.name(letter, "other").split(" ")[0].split("-")[0]
            found[_SCRIPTS.get(name, name.capitalize())] += times
    return max(found, key=lambda name: (found[name], name)) if found else "none"


def _add(counts: _Counts, source: str, chunk: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    for one in (
        counts.whole,
        counts.sources.setdefault(source, _Sum()),
        counts.scripts.setdefault(script(chunk), _Sum()),
    ):
        one.add(chunk, len(ids))
    counts.chunks += 1
    if not tokenizer.lossless:
        counts.changed += tokenizer.decode(ids) != chunk
        counts.unknown += 0 if tokenizer.unknown is None else int(np.count_nonzero(ids == tokenizer.unknown))


def _by_bytes(sums: dict[str, _Sum]) -> list[tuple[str, _Sum]]:
    return sorted(sums.items(), key=lambda item: (-item[1].bytes, item[0]))


def _chunks(text: str) -> Iterator[str]:
    """A text cut at line ends into parts of at least `CHUNK` characters."""
    part: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        size += len(line)
        if size >= CHUNK:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)
