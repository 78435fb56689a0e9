"""The events and the progress display of a running stage: `metrics.jsonl`, progress bars and log lines.

Reports and dashboards read the file. A line is `{"event", "time", "attempt", ...}`. A stage that was killed and resumed
writes some steps twice; the last attempt of a step counts.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ingot.core.errors import name_file, notify
from ingot.core.terminal import error_console

METRICS = "metrics.jsonl"
VOLATILE = frozenset({"time", "attempt", "seconds", "tok_s", "peak_bytes"})
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
    times: dict[int, list[float]] = {}
    for record in _lines(path):
        if "time" in record:
            times.setdefault(record.get("attempt", 0), []).append(record["time"])
    return sum(max(attempt) - min(attempt) for attempt in times.values())


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
    """A progress display with a count, a rate, an ETA and further fields: a bar on a terminal, else plain lines."""

    def __init__(self, description: str, total: int | None, unit: str, console: Console, done: int = 0):
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self._console = console
        self._initial, self._start, self._printed = done, time.monotonic(), time.monotonic()
        self._note = ""
        self._rich: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._rich = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._task = self._rich.add_task(description, total=total, completed=done, note="")
            self._rich.start()

    def advance(self, amount: int = 1, **fields: str) -> None:
        """Add `amount` to the count; `fields` are shown as `name value`."""
        self.done += amount
        if fields:
            self._note = "  ".join(f"{name} {value}" for name, value in fields.items())
        if self._rich:
            self._rich.update(self._task, completed=self.done, note=self._note)
        elif time.monotonic() - self._printed > 10:
            self._print_line()

    def close(self) -> None:
        if self._rich:
            self._rich.stop()
        elif time.monotonic() - self._start > 1:
            self._print_line()

    def _print_line(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._start
        rate = (self.done - self._initial) / max(elapsed, 1e-9)
        percent = f"{100 * self.done / self.total:.0f} %  " if self.total else ""
        eta = f"  ETA {duration((self.total - self.done) / rate)}" if self.total and rate > 0 else ""
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        text = f"  {self.description}: {percent}{self.done:,} {self.unit}  {speed} {self.unit}/s{eta}  {self._note}"
        self._console.print(text.rstrip(), highlight=False, soft_wrap=True)


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
