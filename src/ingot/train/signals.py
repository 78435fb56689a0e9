"""Signals are handled between steps, so that a terminated run saves a checkpoint first.

Ctrl-C and the signals of schedulers and closing terminals (`TERMINATION_SIGNALS`) set a flag, which is checked before
every step and every batch of an evaluation. If there is nothing to save (the first step is still compiling), the run
ends at once; so it does at the second Ctrl-C.

Raising inside a step or an evaluation could save inconsistent weights: evaluations swap the weights for their average.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from ingot.core.heartbeat import HEARTBEAT
from ingot.core.process import TERMINATION_SIGNALS


class Signals:
    """A context manager that defers termination signals to the next `check`.

    Args:
        unsaved: returns whether there are steps since the newest checkpoint.
        agree: for each flag whether it is set on some rank.
    """

    def __init__(self, unsaved: Callable[[], bool], agree: Callable[..., tuple[bool, ...]] = lambda *flags: flags):
        self._unsaved, self._agree = unsaved, agree
        self._requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set a handler
            for number in (signal.SIGINT, *TERMINATION_SIGNALS):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def check(self, *flags: bool) -> tuple[bool, ...]:
        """To be called between steps, by all ranks, which then end after the same step.

        Args:
            flags: what each rank decides by its own clock.

        Returns:
            For each flag whether it is set on some rank.

        Raises:
            KeyboardInterrupt: a rank received a termination signal.
        """
        HEARTBEAT.move()
        requested, *agreed = self._agree(self._requested, *flags)
        if requested:
            raise KeyboardInterrupt
        return tuple(agreed)

    def _request(self, number: int, _: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            sys.exit(128 + number)
        self._requested = True
        if not self._unsaved():
            raise KeyboardInterrupt
