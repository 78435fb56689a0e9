"""Signals are handled between steps: a run that is asked to end saves what it has learned first.

Ctrl-C asks a run to end, and so do the signals of schedulers and closing terminals (`ENDING`). A step is never left
half done: the request is checked before every step and every batch of an evaluation. Where nothing would be lost (the
first step is still compiling) the run ends at once, and so it does at the second Ctrl-C.

Raising wherever the run happens to be would save weights that are just being exchanged for their average; a flag read
after steps alone would miss long evaluations.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from ingot.core.process import ENDING


class Signals:
    """A context manager in which signals that would end the process wait for a `check`.

    Args:
        unsaved: whether steps were made that no checkpoint holds.
    """

    def __init__(self, unsaved: Callable[[], bool]):
        self._unsaved = unsaved
        self._requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            for number in (signal.SIGINT, *ENDING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def check(self) -> None:
        """Called between steps.

        Raises:
            KeyboardInterrupt: the run was asked to end.
        """
        if self._requested:
            raise KeyboardInterrupt

    def _request(self, number: int, _: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            sys.exit(128 + number)
        self._requested = True
        if not self._unsaved():
            raise KeyboardInterrupt
