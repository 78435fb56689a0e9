"""What processes are to each other: how they end, and how long their threads keep a core that others want."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a process to end in good order: a scheduler (`kill`, Kubernetes, Slurm), a terminal that closes, and what
Slurm's `--signal=USR1@120` sends."""


def on_ending(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Be told of `ENDING`, but for what this process ignores, as below `nohup`, or handles already."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


WAITING = {"GOMP_SPINCOUNT": "1000"}
"""How often a thread that waits for others looks again before it sleeps: for some 20 us. libgomp's own spin for a
millisecond, and where another program wants a core they spin on the one that the thread waited for needs. Beside a type
checker a training step of 18 ms took 97 to 149 on average, with this 48; beside two busy loops a row of a small model
was decoded at 18 tokens a second, with this at 1,230. Left alone, training is as fast and decoding a tenth to a quarter
slower."""


def sleep_early(environment: MutableMapping[str, str]) -> None:
    """Add `WAITING`, where the user has not chosen; to be read by a process when it loads torch."""
    if "OMP_WAIT_POLICY" not in environment:
        for name, value in WAITING.items():
            environment.setdefault(name, value)


def busy(seconds: float = 0.1) -> bool:
    """Whether other programs take more than a fifth of one core for so long; False where the system does not say."""
    try:
        before = _worked()
        time.sleep(seconds)
        return _worked() - before > 0.2 * seconds
    except (OSError, ValueError, IndexError):
        return False


def _worked() -> float:
    """Seconds that all cores have worked since the start of the system (Linux: proc_stat(5))."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent does (Linux); elsewhere locks are all that protects."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request was made
