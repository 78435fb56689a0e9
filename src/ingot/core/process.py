"""The process and its machine: termination signals, the parent's death, how long waiting OpenMP threads spin, cores and
memory. Here is what differs between Linux and macOS."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that request an orderly end: of a scheduler (`kill`, Kubernetes, Slurm), of a closing terminal, and of
Slurm's `--signal=USR1@120`."""


def handle_termination(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Install a handler of `TERMINATION_SIGNALS`, except for signals that are ignored (`nohup`) or handled already."""
    for number in TERMINATION_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


SHORT_SPIN = {"GOMP_SPINCOUNT": "1000"}
"""Environment variables that let a waiting OpenMP thread sleep after about 20 us.

By default libgomp spins for a millisecond. On a machine with other busy processes the spinning threads take the cores
that the remaining threads need. On an idle machine a short spin makes decoding slower."""


def shorten_spin(environment: MutableMapping[str, str]) -> None:
    """Add `SHORT_SPIN` to an environment unless the user has set a wait policy; a process reads it when torch loads."""
    if "OMP_WAIT_POLICY" not in environment:
        for name, value in SHORT_SPIN.items():
            environment.setdefault(name, value)


def machine_is_busy(seconds: float = 0.1) -> bool:
    """Measure whether other processes use more than a fifth of one core; False where /proc/stat is not available."""
    try:
        before = _cpu_seconds()
        time.sleep(seconds)
        return _cpu_seconds() - before > 0.2 * seconds
    except (OSError, ValueError, IndexError):
        return False


def _cpu_seconds() -> float:
    """CPU seconds of all cores since the system started (Linux: proc_stat(5))."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def usable_cores() -> int:
    """Cores that this process may use; on macOS, which does not restrict a process to some, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory_bytes() -> int:
    """Most main memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kilobytes on Linux


def available_memory() -> int:
    """Main memory that is free or can be freed at once (Linux: proc_meminfo(5)), at most that of the container; on
    macOS all memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        memory = 1024 * int(fields["MemAvailable"].split()[0])
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return memory


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux only).

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before prctl was called


def open_standard_streams() -> None:
    """Open standard streams that the process was started without (`>&-`) on the null device.

    Otherwise Python has None for them, and the next file that is opened gets the descriptor that libraries print to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, the stream's
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
