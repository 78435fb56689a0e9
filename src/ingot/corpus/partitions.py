"""Divides the sources of a corpus into partitions: the units of work of every runner, and what a killed run keeps.

A partition is some small files, or a range of a large one. They follow from the files alone, so they are the same for
any runner and any number of workers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ingot.corpus.readers.content import content_kind, identify
from ingot.corpus.readers.file_reader import Piece
from ingot.corpus.readers.files import UTF8
from ingot.corpus.readers.locate import InputFile
from ingot.corpus.readers.packing import Damaged
from ingot.corpus.readers.read import source_files
from ingot.corpus.settings import CorpusSettings, Source

PARTITION_BYTES = 4_000_000
"""Text of a partition in a corpus of less than `PARTITIONS` times as much; in a larger one it grows with the corpus."""
PARTITIONS = 4096
PACKED_RANGES = 8
"""Most ranges of a packed file: each is unpacked from the beginning of the file, which is skipped."""
UNPACKED = {".gz": 4, ".zst": 4, ".bz2": 5, ".xz": 5, ".lzma": 5, ".parquet": 3}
"""How much larger the text of a packed file usually is. The last range has what is beyond."""


@dataclass(frozen=True)
class Partition:
    """Files, or a range of one, that one worker reads and prepares."""

    number: int
    source: int
    """The number of the source in the settings."""
    pieces: tuple[Piece, ...]
    bytes: int
    """About how much text they are."""


@dataclass(frozen=True)
class Plan:
    """The partitions of a corpus, in the order of its documents."""

    partitions: list[Partition]
    files: list[int]
    """Number of files of each source."""

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.partitions)


def plan(settings: CorpusSettings) -> Plan:
    """Divide the sources into partitions.

    Raises:
        UserError: a source is missing, empty or of no use.
    """
    files = [source_files(source, settings) for source in settings.sources]
    sizes = [[_text_bytes(file) for file in each] for each in files]
    target = max(PARTITION_BYTES, sum(map(sum, sizes)) // PARTITIONS)
    partitions: list[Partition] = []
    for number, source in enumerate(settings.sources):
        for pieces, bytes in _divided(zip(files[number], sizes[number], strict=True), source, settings, target):
            partitions.append(Partition(len(partitions), number, tuple(pieces), bytes))
    return Plan(partitions, [len(each) for each in files])


def _text_bytes(file: InputFile) -> int:
    """About how much text a file is."""
    return file.file.stat().st_size * UNPACKED.get(file.file.suffix.lower(), 1)


def _divided(
    files: Iterable[tuple[InputFile, int]], source: Source, settings: CorpusSettings, target: int
) -> Iterator[tuple[list[Piece], int]]:
    """The pieces of each partition of a source, and their size. Only lines of JSON and Parquet have ranges."""
    waiting: list[Piece] = []
    bytes = 0
    for file, size in files:
        borders = _borders(file, size, source, settings, target) if size > 2 * target else []
        if waiting and (borders or bytes + size > target):
            yield waiting, bytes
            waiting, bytes = [], 0
        if borders:
            for start, end in zip([0, *borders], [*borders, None], strict=True):
                yield [Piece(file, start, end)], size // (len(borders) + 1)
        else:
            waiting, bytes = [*waiting, Piece(file)], bytes + size
    if waiting:
        yield waiting, bytes


def _borders(file: InputFile, size: int, source: Source, settings: CorpusSettings, target: int) -> list[int]:
    """Where the ranges of a large file begin, without the first."""
    try:
        text, head = identify(file.file, source.encoding, settings.max_bytes)
    except Damaged:
        return []  # reading it names the damage
    kind = source.kind or content_kind(head, file.kind, file.is_source)
    if kind == "parquet" and not text.packing:
        return _row_groups(file, target)
    if kind != "jsonl" or text.encoding != UTF8:
        return []
    if not text.packing:
        size = file.file.stat().st_size
        return list(range(target, size, target))
    step = max(target, -(-size // PACKED_RANGES))
    return list(range(step, size, step))


def _row_groups(file: InputFile, target: int) -> list[int]:
    try:
        metadata = pq.read_metadata(file.file)
    except (pa.ArrowException, OSError):
        return []
    borders, size = [], 0
    for number in range(metadata.num_row_groups):
        if size >= target:
            borders.append(number)
            size = 0
        group = metadata.row_group(number)
        size += group.total_byte_size
    return borders
