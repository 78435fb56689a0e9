"""What a process is doing, for whoever watches it: a small file that a thread rewrites every second.

A supervisor sees two things: whether the process is alive (the file changes) and whether its work moves (the step or
the phase changes). A stopped process has an old file; one that hangs has an old `moved`.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

WAITING = "waiting for the other ranks"
_EVERY_S = 1.0


@dataclass
class Heartbeat:
    """The state of a process; `time.time()` seconds."""

    step: int = 0
    phase: str = "starting"
    moved: float = field(default_factory=time.time)
    """When step or phase last changed."""
    written: float = 0.0
    """When the file was last written."""
    waited_s: float = 0.0
    """Time spent waiting for other ranks."""

    def move(self, step: int | None = None, phase: str | None = None) -> None:
        """Note that the work has moved on."""
        self.step = self.step if step is None else step
        self.phase = phase or self.phase
        self.moved = time.time()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of a phase."""
        before, start = self.phase, time.monotonic()
        self.move(phase=phase)
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - start if phase == WAITING else 0.0
            self.move(phase=before)


HEARTBEAT = Heartbeat()
"""That of this process."""


def write_heartbeat(path: Path) -> None:
    """Write this process's heartbeat to a file every second, until the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        while True:
            HEARTBEAT.written = time.time()
            temporary = path.with_name(f".{path.name}.tmp")
            with contextlib.suppress(OSError):  # a full disk is noticed by whoever writes what counts
                temporary.write_text(json.dumps(asdict(HEARTBEAT)))
                os.replace(temporary, path)
            time.sleep(_EVERY_S)

    threading.Thread(target=write, daemon=True, name="heartbeat").start()


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The heartbeat of another process; None if it has not written one."""
    try:
        return Heartbeat(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
