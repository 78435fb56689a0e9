"""Looks into a source before there is a recipe: which files, how much text, which field holds it.

At most `MAX_BYTES` of text are read; larger sources are extrapolated by the sizes of their files.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ingot.core.errors import UserError
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers.content import content_kind, identify
from ingot.corpus.readers.files import BadRow, Row
from ingot.corpus.readers.locate import InputFile, locate, not_read
from ingot.corpus.readers.packing import Damaged
from ingot.corpus.readers.read import read
from ingot.corpus.readers.rows import file_rows
from ingot.corpus.readers.walk import describe
from ingot.corpus.settings import CorpusSettings, Source

MAX_BYTES = 32_000_000
"""Text that is read of a source."""
MAX_WORDS = 50_000
"""Distinct words that are counted: more than any vocabulary that a first recipe has."""
MAX_FIELD_ROWS = 20
"""Rows of a file that are compared to find the field with the text."""
_WORD = re.compile(r"\w{2,}")


@dataclass(frozen=True)
class Survey:
    """What a source contains."""

    files: Mapping[str, tuple[int, int]]
    """Suffix -> number of files and their bytes, the largest first."""
    documents: int
    """Documents; an estimate if `complete` is false."""
    bytes: int
    """UTF-8 bytes of their text, likewise."""
    complete: bool
    lengths: tuple[int, ...]
    """Bytes of each document that was read."""
    words: int
    """Distinct words of at least two characters; counted up to `MAX_WORDS`."""
    first: tuple[str, ...]
    """The first documents, in the format's form."""
    unread: str
    """What is below the source and is not read, as text; empty for nothing."""
    rejected: str
    """The first row or file that cannot be used and why; empty for none."""


def survey(settings: CorpusSettings, most: int = MAX_BYTES) -> Survey:
    """Look into the only source of a corpus.

    Args:
        settings: its settings.
        most: bytes of text to read.

    Raises:
        UserError: the source is missing or empty, or no row of it fits the format.
    """
    (source,) = settings.sources
    files = locate(source)
    sizes = {file.path: file.file.stat().st_size for file in files}
    rejected: list[Quarantined] = []
    lengths: list[int] = []
    first: list[str] = []
    text_bytes: Counter[str] = Counter()
    words: set[str] = set()
    complete = True
    for batch in read(settings, rejected.append):
        if text_bytes.total() >= most:
            complete = False
            break
        texts = batch.column("text").to_pylist()
        for text, path in zip(texts, batch.column("path").to_pylist(), strict=True):
            lengths.append(len(text.encode()))
            text_bytes[path] += lengths[-1]
            if len(words) < MAX_WORDS:
                words.update(_WORD.findall(text))
        first += texts[: 8 - len(first)]
    read_bytes, factor = text_bytes.total(), 1.0
    if not complete:
        done = list(text_bytes)[:-1]  # the last file may not have been read to its end
        density = sum(text_bytes[p] for p in done) / sum(sizes[p] for p in done) if done else 1.0
        factor = max(1.0, density * sum(sizes.values()) / read_bytes)
    by_suffix: dict[str, list[int]] = {}
    for file in files:
        by_suffix.setdefault("".join(file.file.suffixes[-2:]) or file.file.name, []).append(sizes[file.path])
    largest = sorted(by_suffix.items(), key=lambda item: -sum(item[1]))
    return Survey(
        {suffix: (len(each), sum(each)) for suffix, each in largest},
        round(len(lengths) * factor),
        round(read_bytes * factor),
        complete,
        tuple(lengths),
        min(len(words), MAX_WORDS),
        tuple(first),
        describe(not_read(source)),
        rejected[0].message() if rejected else "",
    )


def text_field(source: Source) -> str | None:
    """The field with the most text in the rows of a source's first file of rows; None where there is none."""
    for file in locate(source):
        characters: Counter[str] = Counter()
        for row in _rows(file):
            characters.update({name: len(value) for name, value in row.items() if isinstance(value, str)})
        if characters:
            return characters.most_common(1)[0][0]
    return None


def _rows(file: InputFile) -> list[dict[str, Any]]:
    """The first rows of a file; none of a text."""
    try:
        text, head = identify(file.file, None, MAX_BYTES)
        rows = file_rows(text, content_kind(head, file.kind, file.is_source)) or ()
        values = [row.value for row in islice(rows, MAX_FIELD_ROWS) if isinstance(row, Row)]
        return [value for value in values if isinstance(value, dict)]
    except (Damaged, BadRow, UserError):
        return []  # reading the source reports it
