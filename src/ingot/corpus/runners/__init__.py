"""Who computes the partitions of a corpus: processes of this machine, Daft, or a Ray cluster. The bytes are the same.

A runner is a function `run(work, partitions, workers)` that calls `spool.process` for each partition and yields its
number and error message, in any order. It keeps nothing: what is done is in the spool.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from ingot.core.errors import UserError
from ingot.corpus.partitions import Partition
from ingot.corpus.settings import Runner
from ingot.corpus.spool import Work

Run = Callable[[Work, Sequence[Partition], int], Iterator[tuple[int, str]]]

LOST_WORKER = (
    "a process that prepared documents was ended from outside, most often for want of memory; lower `workers` and run "
    "the same command again, which keeps what is done"
)


def load_runner(name: Runner) -> Run:
    """The function of a runner. Raises UserError if its package is not installed."""
    if name != "local" and find_spec(name) is None:
        raise UserError(f"runner: found no package {name}, which runs it; pip install 'ingot[ray]'")
    return importlib.import_module(f"ingot.corpus.runners.{name}_runner").run
