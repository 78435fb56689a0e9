"""How processes end: with the one that started them, or when they are asked to."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
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


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent does (Linux); elsewhere locks are all that protects."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request was made
