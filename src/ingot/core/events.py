"""The events and the progress display of a running stage: `metrics.jsonl`, progress bars and log lines.

Reports and dashboards read the file. A line is `{"event", "time", "attempt", ...}`. A stage that was killed and resumed
writes some steps twice; the last attempt of a step counts.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ingot.core.errors import name_file, notify
from ingot.core.terminal import error_console

METRICS = "metrics.jsonl"
VOLATILE = frozenset({"time", "attempt", "seconds", "tok_s", "eta_s", "peak_bytes", "waiting"})
"""Fields that differ between two runs of one recipe; all others are bitwise equal on one CPU process."""


class Listener(Protocol):
    """Receives every event after it is written, for example a dashboard."""

    def on_event(self, record: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class EventLog:
    """Appends events to a stage's `metrics.jsonl`. Opening it removes the incomplete last line of a killed writer."""

    def __init__(self, path: Path):
        self.path = path
        self.listeners: list[Listener] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        events = _remove_incomplete_line(path)
        self.attempt = 1 + max((e.get("attempt", 0) for e in events), default=0)
        self._file = path.open("a", encoding="utf-8")
        self._flushed = 0.0

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. The file is flushed when half a second has passed since the last flush."""
        now = time.time()
        record = {"event": event, "time": round(now, 3), "attempt": self.attempt, **fields}
        with name_file(self.path):
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        for listener in self.listeners:
            listener.on_event(record)
        if now - self._flushed > 0.5:
            self.flush()

    def flush(self) -> None:
        with name_file(self.path):
            self._file.flush()
        for listener in self.listeners:
            listener.flush()
        self._flushed = time.time()

    def close(self) -> None:
        with name_file(self.path):
            self._file.close()


def read_events(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Events of a stage in order; a later attempt replaces the events of the same step.

    Args:
        path: the stage's `metrics.jsonl`.
        event: the event type to return; default: all.
    """
    records: dict[Any, dict[str, Any]] = {}
    for number, record in enumerate(_lines(path)):
        if event is None or record["event"] == event:
            records[event_id(record) if "step" in record else number] = record
    return list(records.values())


def event_id(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identifies an event that has a step; of two events with the same id the later one counts."""
    return record["event"], record.get("model"), record["step"]


def stable(record: dict[str, Any]) -> dict[str, Any]:
    """An event without its `VOLATILE` fields."""
    return {k: v for k, v in record.items() if k not in VOLATILE}


def elapsed_seconds(path: Path) -> float:
    """Seconds from the first to the last event of each attempt, summed over attempts."""
    return sum(attempt.end - attempt.start for attempt in attempts(path))


class Attempt(NamedTuple):
    """One process that worked on a stage."""

    start: float
    """Unix time of its first event."""
    end: float
    resumed_from: int | None
    """Step of the checkpoint that it went on from; None if it began at the start."""
    last_step: int | None
    """The last step that it logged; None for none."""


def attempts(path: Path) -> list[Attempt]:
    """The attempts at a stage, in order; all but the last one were interrupted or failed."""
    found: dict[int, Attempt] = {}
    for record in _lines(path):
        time, number = record.get("time", 0.0), record.get("attempt", 0)
        one = found.get(number, Attempt(time, time, None, None))._replace(end=time)
        if record["event"] == "resume":
            one = one._replace(resumed_from=record.get("after"))
        elif record["event"] == "step":
            one = one._replace(last_step=record.get("step"))
        found[number] = one
    return [found[number] for number in sorted(found)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the writer has not finished this line
            if (record := _parsed(path, number, line)) is not None:
                yield record


def _remove_incomplete_line(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    records = (_parsed(path, number, line) for number, line in enumerate(data[:end].split(b"\n")[:-1], 1))
    return [record for record in records if record is not None]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    """The event of a line; None, with a notice, for a line that is none: no result depends on the log."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    numbers = ("time", "attempt", "step")
    if (
        isinstance(record, dict)
        and isinstance(record.get("event"), str)
        and all(type(record.get(name, 0)) in (int, float) for name in numbers)
    ):
        return record
    notify(f"{path}: skipped line {number}, which is not an event that a stage wrote")
    return None


class Bar:
    """A progress display: a bar on a terminal, else a plain line every ten seconds.

    Both show the count, the total if it is known, the time left, and further fields. `total` may be set later.
    """

    def __init__(self, description: str, total: int | None, unit: str, console: Console, done: int = 0):
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self.fields: Mapping[str, str] = {}
        self._console = console
        self._start = self._printed = time.monotonic()
        self._measured_from: tuple[float, int] | None = None
        self._seconds_left: float | None = None
        self._rich: Progress | None = None
        if console.is_terminal:
            name, status = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[status]}"))
            self._rich = Progress(name, BarColumn(24), status, console=console)
            self._task = self._rich.add_task(description, total=total, completed=done, status=self._status())
            self._rich.start()

    def advance(self, amount: int = 1, **fields: str) -> None:
        """Add `amount` to the count; `fields` are shown as `name value` until others replace them.

        The time left is measured from the end of the first piece of work, which may have compiled.
        """
        now, done = time.monotonic(), self.done + amount
        if self._measured_from is None:
            self._measured_from = now, done
        start, first = self._measured_from
        left = None
        if self.total is not None and done > first:
            left = max(0, self.total - done) * (now - start) / (done - first)
        self.show(done, left, **fields)

    def show(self, done: int, seconds_left: float | None, **fields: str) -> None:
        """Set the count and the time left, for work whose pieces don't take equally long; `fields` as in `advance`."""
        self.done, self._seconds_left = done, seconds_left
        self.fields = fields or self.fields
        if self._rich:
            self._rich.update(self._task, total=self.total, completed=done, status=self._status())
        elif done != self.total and time.monotonic() - self._printed > 10:  # `close` prints the last line
            self._print_line(self._status())

    def close(self) -> None:
        """Print the count and the time that it took, if that was more than a second."""
        self._seconds_left = None
        if self._rich:
            self._rich.update(self._task, status=self._status())
            self._rich.stop()
        elif time.monotonic() - self._start > 1:
            self._print_line(self._status())

    def _status(self) -> str:
        """ "1,344 of 1,517 rows, 3 s left  loss 2.5730"; without an estimate the time so far."""
        count = size if self.unit == "bytes" else "{:,}".format
        total = "" if self.total is None else f" of {count(self.total)}"
        unit = "" if self.unit == "bytes" else f" {self.unit}"
        left, elapsed = self._seconds_left, time.monotonic() - self._start
        when = f" in {_whole(elapsed)}" if left is None else f", {_whole(left)} left"
        note = "".join(f"  {name} {value}" for name, value in self.fields.items())
        return f"{count(self.done)}{total}{unit}{when}{note}"

    def _print_line(self, status: str) -> None:
        self._printed = time.monotonic()
        self._console.print(f"  {self.description}: {status}", highlight=False, markup=False, soft_wrap=True)


class Display:
    """Progress bars and log lines on standard error; nothing when quiet."""

    def __init__(self, quiet: bool = False):
        self.console = error_console(quiet=quiet)

    def notify(self, text: str) -> None:
        """Print one line."""
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, description: str, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Bar]:
        bar = Bar(description, total, unit, self.console, done)
        try:
            yield bar
        finally:
            bar.close()


def duration(seconds: float) -> str:
    """81.24 -> "81.2 s", 303 -> "5 min 3 s", 8000 -> "2 h 13 min"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(value: float) -> str:
    """Bytes in decimal units: 3200000 -> "3.2 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:,.0f} bytes"


def _whole(seconds: float) -> str:
    """A duration in whole seconds, rounded up, so that work that is not over never has 0 s left."""
    seconds = math.ceil(seconds)
    return f"{seconds} s" if seconds < 100 else duration(seconds)
