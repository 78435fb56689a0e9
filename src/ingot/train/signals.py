"""Stopping in time: a run that is asked to end saves what it has learned since its last checkpoint.

Ctrl-C asks, and so does what schedulers and closing terminals send (`ENDING`). A step is never left half done: whoever
asks is heard at the next `check`, which stands before every step and every batch of an evaluation. Where nothing would
be lost (the first step still compiles) the run ends at once, and so it does at the second Ctrl-C.

Rejected: raising wherever the run happens to be and saving then, for weights that are just being exchanged for their
average would be saved; and a flag that is read after a step alone, which misses long evaluations.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from ingot.core.process import ENDING


class Interruptions:
    """While it is entered, signals that would end the process wait for a `check`.

    Args:
        unsaved: whether the run has learned something that no checkpoint holds.
    """

    def __init__(self, unsaved: Callable[[], bool]):
        self._unsaved = unsaved
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set a handler
            for number in (signal.SIGINT, *ENDING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def check(self) -> None:
        """Between two pieces of work.

        Raises:
            KeyboardInterrupt: the run was asked to end.
        """
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            sys.exit(128 + number)
        self._asked = True
        if not self._unsaved():
            raise KeyboardInterrupt
