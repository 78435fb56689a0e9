"""The ranks of a train stage on this machine: one process each, started, watched and ended together.

Ranks find each other through a file in a temporary directory, a new one for each attempt; torchrun's local restarts
fail in half of the cases with gloo, because a new attempt reads the addresses of the last one. On several machines
torchrun starts the same processes (`docs/cluster.md`).

If a rank fails, the others cannot go on: they end, and all start again from the newest checkpoint. An error that the
user can fix and an interruption end the run instead.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ingot.core.heartbeat import WAITING, Heartbeat, read_heartbeat
from ingot.core.process import usable_cores
from ingot.core.ranks import LOST_PEER, STORE, heartbeat_file

Child = subprocess.Popen[bytes]
Start = Callable[[Mapping[str, str]], Child]
"""Starts a rank with additional environment variables."""

INTERRUPTED, USER_ERROR = 130, 2
_POLL_S = 0.1
_GRACE_S = 10.0
"""Time in which the other ranks end by themselves after one has failed."""
_STALE_S = 5.0
"""A heartbeat older than this is that of a stopped process: a running one rewrites it every second."""


class Failure(NamedTuple):
    """Why an attempt ended."""

    rank: int
    code: int
    """Exit code; negative: the signal."""
    where: str = ""
    """What the rank was doing, for one that did not move."""

    def __str__(self) -> str:
        if self.where:
            return f"rank {self.rank} does not move: {self.where}"
        name = f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"failed with exit code {self.code}"
        return f"rank {self.rank} {name}"


def run_ranks(
    start: Start,
    size: int,
    directory: Path,
    *,
    restarts: int,
    hang_seconds: float,
    notify: Callable[[str], None],
    poll_seconds: float = _POLL_S,
) -> int:
    """Run the ranks of a stage to their end; the exit code.

    Args:
        start: starts a rank.
        directory: directory of the stage.
        restarts: how often all ranks are started again after one failed.
        hang_seconds: how long no rank may move.
        notify: receives a sentence about each failure.
    """
    for attempt in range(restarts + 1):
        failure = _attempt(start, size, directory, hang_seconds, poll_seconds, notify)
        if failure is None:
            return 0
        if failure.code in (USER_ERROR, INTERRUPTED):
            return failure.code
        if attempt == restarts:
            notify(f"{failure}; it was the {_ordinal(attempt + 1)} failure, so the run ends")
            break
        notify(f"{failure}; starting again from the newest checkpoint ({attempt + 1} of {restarts})")
    return 1


def _attempt(
    start: Start,
    size: int,
    directory: Path,
    hang_seconds: float,
    poll_seconds: float,
    notify: Callable[[str], None],
) -> Failure | None:
    for rank in range(size):
        heartbeat_file(directory, rank).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ingot-ranks-") as meeting:
        children: list[Child] = []
        with _ended(children, notify):
            for rank in range(size):  # one by one: an interruption must find those that have started
                children.append(start(rank_environment(rank, size, Path(meeting) / "store")))
            return _watch(children, directory, hang_seconds, poll_seconds)


def rank_environment(rank: int, size: int, store: Path) -> dict[str, str]:
    """Environment variables of a rank; those that the user has set take precedence for threads and network."""
    default = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // size)),
    }
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, STORE: store}
    return {name: os.environ.get(name, value) for name, value in default.items()} | {
        n: str(v) for n, v in ranks.items()
    }


@contextlib.contextmanager
def _ended(children: Sequence[Child], notify: Callable[[str], None]) -> Iterator[None]:
    """Context after which no child is left. An interruption is passed on once, so that the ranks save and end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(subprocess.TimeoutExpired):
            _wait(children, timeout=1.0)  # a terminal sends its signal to all processes
        if running := [child for child in children if child.poll() is None]:
            notify("saving before it ends; Ctrl-C again ends it at once")
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()
        raise
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _watch(children: Sequence[Child], directory: Path, hang_seconds: float, poll_seconds: float) -> Failure | None:
    """Wait until all ranks have ended, or one has failed, or none moves."""
    watch, started = Watch([heartbeat_file(directory, rank) for rank in range(len(children))]), time.monotonic()
    while True:
        codes = [child.poll() for child in children]
        if any(codes):
            first = [rank for rank, code in enumerate(codes) if code]
            with contextlib.suppress(subprocess.TimeoutExpired):
                _wait(children, _GRACE_S)
            return _first_failure([child.poll() for child in children], first)
        if all(code == 0 for code in codes):
            return None
        now = time.monotonic()
        if (stuck := hanging(watch.read(now), now, started, hang_seconds)) is not None:
            return stuck
        time.sleep(poll_seconds)


def _first_failure(codes: Sequence[int | None], first: Sequence[int]) -> Failure:
    """The failure that decides: a user's error, an interruption, then a signal, then the rank that ended first.

    A rank that only lost its peer is not the cause.
    """
    failed = {rank: code for rank, code in enumerate(codes) if code}

    def urgency(rank: int) -> tuple[bool, bool, bool, bool, bool, int]:
        code = failed[rank]
        return code != USER_ERROR, code != INTERRUPTED, code == LOST_PEER, code > 0, rank not in first, rank

    rank = min(failed, key=urgency)
    return Failure(rank, failed[rank])


class Watch:
    """Heartbeats of the ranks, timed by this process's monotonic clock: when a change was first seen here.

    That clock stands still while the machine sleeps, and nobody sets it. By the times in the files, a laptop that
    wakes up would have ranks that have not moved for hours.
    """

    def __init__(self, files: Sequence[Path]):
        self._files = files
        self._written = [Heartbeat(moved=0.0) for _ in files]
        self._seen: list[Heartbeat | None] = [None for _ in files]

    def read(self, now: float) -> list[Heartbeat | None]:
        """The heartbeats with `moved` and `written` in seconds of `time.monotonic`; None for a rank without one."""
        for rank, file in enumerate(self._files):
            if (beat := read_heartbeat(file)) is not None:
                before, seen = self._written[rank], self._seen[rank]
                moved = seen.moved if seen and beat.moved == before.moved else now
                written = seen.written if seen and beat.written == before.written else now
                self._written[rank], self._seen[rank] = beat, replace(beat, moved=moved, written=written)
        return list(self._seen)


def hanging(beats: Sequence[Heartbeat | None], now: float, started: float, hang_seconds: float) -> Failure | None:
    """The rank that keeps all others waiting, if none has moved for `hang_seconds`; else None.

    It is one whose process is stopped, else one that does not wait for others, else the one that is furthest behind.
    """
    newest = max([beat.moved for beat in beats if beat], default=started)
    if now - max(newest, started) < hang_seconds:
        return None

    def suspicion(rank: int) -> tuple[bool, bool, int]:
        beat = beats[rank]
        if beat is None:
            return False, False, -1
        return now - beat.written < _STALE_S, beat.phase == WAITING, beat.step

    rank = min(range(len(beats)), key=suspicion)
    beat = beats[rank] or Heartbeat()
    state = "its process is stopped" if now - beat.written >= _STALE_S else "its process runs"
    where = f"step {beat.step:,}, {beat.phase}, for {now - beat.moved:,.0f} s; {state}"
    return Failure(rank, 1, where)


def _wait(children: Sequence[Child], timeout: float) -> None:
    end = time.monotonic() + timeout
    for child in children:
        child.wait(max(0.0, end - time.monotonic()))


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
