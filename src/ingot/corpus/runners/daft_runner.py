"""Partitions on Daft, in processes that it starts."""

import os
import pickle
from collections.abc import Iterator, Sequence

from ingot.corpus.partitions import Partition
from ingot.corpus.spool import Work, process


def run(work: Work, partitions: Sequence[Partition], workers: int) -> Iterator[tuple[int, str]]:
    """Process partitions; as `runners` says. Daft takes the cores of the machine, whatever `workers` is."""
    os.environ["DO_NOT_TRACK"] = "true"  # read when daft is imported
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    import daft  # pyright: ignore[reportMissingImports]

    call = daft.func(_process, return_dtype=daft.DataType.string(), use_process=True)
    frame = daft.from_pydict({"partition": [pickle.dumps((work, partition)) for partition in partitions]})
    frame = frame.into_batches(1)
    for row in frame.select(call(frame["partition"]).alias("done")).iter_rows():
        number, _, message = row["done"].partition(" ")
        yield int(number), message


def _process(pickled: bytes) -> str:
    work, partition = pickle.loads(pickled)
    return f"{partition.number} {process(work, partition)}"
