"""Partitions on processes of this machine: reading rows holds Python's lock, so threads would wait for each other.

A new process imports for most of a second before its first partition. One of the workers is therefore a thread of this
process, which begins at once; without it, a corpus of 30 MB takes about as long on two cores as on one.
"""

import importlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from ingot.core.errors import UserError, show_warning
from ingot.core.process import die_with_parent
from ingot.corpus.partitions import Partition
from ingot.corpus.runners import LOST_WORKER
from ingot.corpus.spool import Work, process

FEW = 4
"""Partitions that are done sooner in this process than others start."""


def run(work: Work, partitions: Sequence[Partition], workers: int) -> Iterator[tuple[int, str]]:
    """Process partitions; as `runners` says. Raises UserError if a process is killed."""
    if workers == 1 or len(partitions) <= FEW:
        for partition in partitions:
            yield partition.number, process(work, partition)
        return
    processes = min(workers, len(partitions)) - 1
    own = ThreadPoolExecutor(1)
    others = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (os.getpid(),))
    free: list[Executor] = [own, *[others] * processes]
    waiting, running = list(partitions)[::-1], dict[Future[str], tuple[int, Executor]]()
    try:
        while waiting or running:
            while waiting and free:
                pool, partition = free.pop(), waiting.pop()
                running[pool.submit(_process, work, partition)] = partition.number, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, pool = running.pop(future)
                free.append(pool)
                yield number, future.result()
    except BrokenProcessPool:
        raise UserError(LOST_WORKER) from None
    finally:
        others.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
        own.shutdown(cancel_futures=True)  # it ends its partition, for the spool may be removed after an error


def _start(parent: int) -> None:
    """Prepare a worker: it ends with its parent, which handles signals, and uses one core."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.environ["POLARS_MAX_THREADS"] = "1"
    warnings.showwarning = show_warning


def _process(work: Work, partition: Partition) -> str:
    return importlib.import_module("ingot.corpus.spool").process(work, partition)  # polars reads its threads first
