"""Conversations that the chat format refuses: left out of the store, counted, and listed in `quarantine.jsonl`."""

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from ingot.core.artifact import atomic_open
from ingot.corpus.funnel import Quarantined


class Refused:
    """Context manager that writes `quarantine.jsonl` on success; after an exception nothing remains.

    Args:
        out: directory of the file.
    """

    def __init__(self, out: Path):
        self._opened = atomic_open(out / "quarantine.jsonl")
        self.documents = 0
        """Number of refused documents since `start`."""
        self.first: str = ""
        """Location of the first of them, and why it was refused."""

    def __enter__(self) -> "Refused":
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._opened.__exit__(kind, error, trace)

    def start(self) -> None:
        """Begin to count a split."""
        self.documents, self.first = 0, ""

    def add(self, document: pa.RecordBatch, reason: str) -> None:
        """Record a document.

        Args:
            document: one row with its identity.
            reason: why it was refused.
        """
        source, path, offset, size = (document[name][0].as_py() for name in ("source", "path", "offset", "bytes"))
        record = Quarantined(source, path, line=0, offset=offset, bytes=size, reason=reason)
        self._file.write(json.dumps(asdict(record), ensure_ascii=False).encode() + b"\n")
        self.documents += 1
        self.first = self.first or f"{path}, document at {offset:,}: {reason}"
