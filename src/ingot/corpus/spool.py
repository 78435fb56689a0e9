"""The first phase of a corpus: a worker reads and prepares a partition and writes the result to the spool.

The spool is a directory with a file of Arrow tables and a report for each partition that is done. It is what a killed
run continues from, and what the second phase reads: columns of all documents first, then the text once.
"""

import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ingot.core.artifact import atomic_json, atomic_open, atomic_write, digest_json
from ingot.core.errors import UserError, memory_error_message, os_error_message
from ingot.core.events import Display
from ingot.corpus.funnel import MAX_FIELDS, Quarantined
from ingot.corpus.partitions import Partition, Plan
from ingot.corpus.prepare import Loaded, load, prepare
from ingot.corpus.readers.file_reader import Raw
from ingot.corpus.readers.read import batches, read_piece
from ingot.corpus.settings import CorpusSettings

SPOOL = ".spool"
"""Directory in the stage's."""
_PLAN = "plan.txt"


@dataclass(frozen=True)
class Work:
    """What a worker needs beside its partition; it may be on another machine that sees the same files."""

    settings: str
    """`CorpusSettings` as JSON."""
    spool: str
    """An absolute path."""
    directory: str
    """Where relative paths begin."""


@dataclass
class Report:
    """What the reading of a partition says beside its documents."""

    documents: int = 0
    rejected: int = 0
    """Rows and files in quarantine."""
    fields: list[tuple[str, str, int]] = field(default_factory=list)
    """(name, what became of it, number of rows)."""
    remarks: list[tuple[str, str]] = field(default_factory=list)
    """(how a file was read, its path)."""


def process(work: Work, partition: Partition) -> str:
    """Read, prepare and spool a partition; called by the workers of every runner.

    Returns:
        An error that the user can fix, or "".
    """
    try:
        os.chdir(work.directory)
        settings, loaded = _loaded(work.settings)
        _write(Path(work.spool), partition, settings, loaded)
    except UserError as error:
        return str(error)
    except (OSError, MemoryError) as error:
        message = os_error_message(error, work.spool) or memory_error_message(error)
        if message is None:
            raise
        return message
    return ""


@functools.lru_cache(1)
def _loaded(settings: str) -> tuple[CorpusSettings, Loaded]:
    parsed = CorpusSettings.model_validate_json(settings)
    return parsed, load(parsed, Display(quiet=True))


def _write(spool: Path, partition: Partition, settings: CorpusSettings, loaded: Loaded) -> None:
    report, fields = Report(), Counter[tuple[str, str]]()
    source = settings.sources[partition.source]

    def count(uses: Mapping[str, str]) -> None:
        add_fields(fields, uses.items())

    def remark(text: str, path: str) -> None:
        report.remarks.append((text, path))

    with (
        atomic_open(_quarantine(spool, partition.number)) as rejected,
        atomic_open(_data(spool, partition.number)) as file,
    ):

        def reject(record: Quarantined) -> None:
            report.rejected += 1
            rejected.write(json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n")

        def documents() -> Iterator[Raw | pa.Table]:
            for piece in partition.pieces:
                yield from read_piece(piece, source, settings, reject, count, remark)

        writer = None
        for batch in batches(documents()):
            table = prepare(batch, settings, loaded)
            writer = writer or pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
            writer.write_table(table)
            report.documents += table.num_rows
        if writer is not None:
            writer.close()
    report.fields = [(*use, rows) for use, rows in fields.items()]
    atomic_json(_report(spool, partition.number), asdict(report))


def add_fields(fields: Counter[tuple[str, str]], uses: Any, rows: int = 1) -> None:
    """Count the uses of fields; names beyond `MAX_FIELDS` count as "others"."""
    for use in uses:
        fields[use if use in fields or len(fields) < MAX_FIELDS else ("others", use[1])] += rows


class Spool:
    """The partitions of a corpus that are done.

    Args:
        directory: of the spool; what another plan or other settings left there is removed.
        plan: the partitions.
        settings: of the stage.
    """

    def __init__(self, directory: Path, plan: Plan, settings: CorpusSettings):
        self._directory, self._plan = directory, plan
        self.work = Work(settings.model_dump_json(), str(directory.absolute()), os.getcwd())
        digest = digest_json(
            [settings.model_dump(mode="json", exclude={"workers", "runner", "overlap_with"}), repr(plan)]
        )
        if not (directory / _PLAN).exists() or (directory / _PLAN).read_text() != digest:
            self.remove()
            atomic_write(directory / _PLAN, digest)

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def is_done(self, number: int) -> bool:
        return _report(self._directory, number).exists()

    def report(self, number: int) -> Report:
        return Report(**json.loads(_report(self._directory, number).read_text()))

    def rejected(self, number: int) -> Iterator[Quarantined]:
        """The rows and files of a partition that could not be read."""
        with _quarantine(self._directory, number).open("rb") as file:
            for line in file:
                yield Quarantined(**json.loads(line))

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """All documents in order, in batches.

        Args:
            columns: names of columns to read; None reads all. Others are not unpacked.
        """
        for partition in self._plan.partitions:
            path = _data(self._directory, partition.number)
            if path.stat().st_size == 0:
                continue
            with pa.memory_map(str(path)) as file:
                options = None
                if columns is not None:
                    schema = pa.ipc.open_file(file).schema
                    wanted = [schema.get_field_index(name) for name in columns]
                    options = pa.ipc.IpcReadOptions(included_fields=sorted(wanted))
                reader = pa.ipc.open_file(file, options=options)
                for number in range(reader.num_record_batches):
                    table = pa.Table.from_batches([reader.get_batch(number)])
                    yield table if columns is None else table.select(columns)


def _data(spool: Path, number: int) -> Path:
    return spool / f"part-{number:05d}.arrow"


def _quarantine(spool: Path, number: int) -> Path:
    return spool / f"part-{number:05d}.quarantine.jsonl"


def _report(spool: Path, number: int) -> Path:
    return spool / f"part-{number:05d}.json"
