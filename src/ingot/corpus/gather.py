"""The first phase of a corpus: a runner prepares partitions, and their reports are read in order."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.core.process import usable_cores
from ingot.corpus.funnel import Funnel
from ingot.corpus.partitions import PARTITION_BYTES, Partition, Plan
from ingot.corpus.readers.content import identify
from ingot.corpus.readers.packing import unpacked
from ingot.corpus.readers.read import Account
from ingot.corpus.runners import load_runner
from ingot.corpus.settings import CorpusSettings
from ingot.corpus.spool import Spool, add_fields


def prepare_all(settings: CorpusSettings, plan: Plan, spool: Spool, funnel: Funnel, display: Display) -> None:
    """A runner prepares the partitions that are not in the spool; their reports are read in order.

    Raises:
        UserError: of the first partition that has one; a source without any usable row.
    """
    waiting = [partition for partition in plan.partitions if not spool.is_done(partition.number)]
    done = plan.bytes - sum(partition.bytes for partition in waiting)
    if done:
        display.notify(
            f"{len(plan.partitions) - len(waiting):,} of {len(plan.partitions):,} parts were prepared before"
        )
    errors: dict[int, str] = {}
    run = load_runner(settings.runner)
    reports = _Reports(settings, plan, spool, funnel)
    with display.bar("documents", plan.bytes, "bytes", done) as bar:
        reports.read(errors)
        for number, error in run(spool.work, waiting, settings.workers or usable_cores()):
            errors[number] = error
            reports.read(errors)
            bar.advance(plan.partitions[number].bytes, documents=f"{reports.documents:,}")


class _Reports:
    """Reads the reports of partitions in order, as far as they are done."""

    def __init__(self, settings: CorpusSettings, plan: Plan, spool: Spool, funnel: Funnel):
        self._plan, self._spool, self._funnel = plan, spool, funnel
        self._accounts = [Account(s, n) for s, n in zip(settings.sources, plan.files, strict=True)]
        self._next = 0
        self._counted: tuple[Path | None, int, int] = None, 0, 0
        self.documents = 0

    def read(self, errors: Mapping[int, str]) -> None:
        """Read the reports that follow. Raises UserError for a partition's error, and for a source of no use."""
        partitions = self._plan.partitions
        while self._next < len(partitions):
            partition = partitions[self._next]
            if errors.get(partition.number):
                raise UserError(errors[partition.number])
            if not self._spool.is_done(partition.number):
                return
            self._next += 1
            self._add(partition)
            is_last = self._next == len(partitions) or partitions[self._next].source != partition.source
            if is_last:
                self._accounts[partition.source].close()

    def _add(self, partition: Partition) -> None:
        report, account = self._spool.report(partition.number), self._accounts[partition.source]
        account.usable |= report.documents > 0
        self.documents += report.documents
        for remark in report.remarks:
            account.remark(*remark)
        for name, use, rows in report.fields:
            add_fields(self._funnel.fields, [(name, use)], rows)
        if report.rejected:
            for record in self._spool.rejected(partition.number):
                if record.line and partition.pieces[0].start:
                    record = replace(record, line=record.line + self._lines_before(partition))
                account.reject(record)
                self._funnel.quarantine(record)

    def _lines_before(self, partition: Partition) -> int:
        """Lines before those of a range of a file. Counted where a row is bad, since it reads the file again."""
        (piece,) = partition.pieces
        end, path = piece.start - 1, piece.file.file
        if self._counted[:2] != (path, end):
            text, _ = identify(path, None, PARTITION_BYTES)
            position, lines = self._counted[1:] if self._counted[0] == path else (0, 0)
            for block in unpacked(path, text.packing, position):
                lines += block[: end - position].count(text.newline)
                position += len(block)
                if position >= end:
                    break
            self._counted = path, end, lines
        return self._counted[2] + 1  # of the line that ends in the range, too
