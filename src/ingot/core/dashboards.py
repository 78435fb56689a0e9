"""Dashboards that receive a stage's metrics: TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` is the source of all of them. The process that writes the log passes each event to the sinks. A sink
that raises is closed with a warning, and training continues.

A resumed stage is one run in a dashboard. At the first metric of an attempt, each sink is opened and receives the log's
earlier steps up to the resumed checkpoint. So a dashboard shows no step twice, and misses none that the killed process
had not sent. (`purge_step` of SummaryWriter removes repeated steps, and cannot restore missing ones.)

Sinks are offline unless the user's environment says otherwise (WANDB_MODE, TRACKIO_SPACE_ID). To add a sink, write a
class and add one line to `SINKS`.
"""

import contextlib
import importlib.util
import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ingot.core.errors import UserError, nearest
from ingot.core.events import METRICS, event_id, read_events

QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Default environment variables of the dashboards: no network, no telemetry, no console output."""

_NOT_SCALARS = frozenset({"event", "time", "attempt", "step", "model"})


@dataclass(frozen=True)
class Target:
    """The run and the stage that metrics belong to."""

    root: Path
    """Output root."""
    run: str
    """Name of the run; the dashboard's project."""
    label: str
    """Name of the stage within the run: `base`, or `lr=0.001,seed=1/base` in a sweep."""
    kind: str
    key: str
    settings: Mapping[str, Any]


class Sink(Protocol):
    """Receives scalars by step. An exception from any method closes this sink only."""

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in `ROOT/tensorboard/RUN/LABEL`.

    tensorboard's EventFileWriter is not used, because it imports tensorflow where that is installed.
    """

    def __init__(self, target: Target):
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        directory = target.root / "tensorboard" / target.run / target.label
        directory.mkdir(parents=True, exist_ok=True)
        for previous in directory.glob("events.out.tfevents.*.ingot"):
            previous.unlink()  # the new file repeats their content
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.ingot"
        self._records = RecordWriter((directory / name).open("wb"))
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(step=step, wall_time=wall_time, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self, failed: bool) -> None:
        self._records.close()


class WandB:
    """A run of Weights & Biases whose id is the stage's key: offline in `ROOT/wandb` unless WANDB_MODE says otherwise.

    Offline, the newest directory of an id has the complete run. Online, the server's run of that id is resumed, and
    steps that it has already are not sent again.
    """

    def __init__(self, target: Target):
        import wandb  # pyright: ignore[reportMissingImports]

        mode = os.environ["WANDB_MODE"]
        self._run = wandb.init(
            project=target.run,
            name=target.label,
            id=target.key,
            job_type=target.kind,
            config=dict(target.settings),
            dir=str(target.root.absolute()),
            mode=mode,
            resume="allow" if mode == "online" else None,
        )
        self._first = self._run.starting_step

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        if step >= self._first:
            self._run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """wandb flushes in its own thread."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in trackio's local store (`trackio show --project RUN`); each attempt rewrites it."""

    def __init__(self, target: Target):
        with contextlib.redirect_stdout(io.StringIO()):
            import trackio  # pyright: ignore[reportMissingImports]

            name = f"{target.label} {target.key[:8]}"
            with contextlib.suppress(ValueError):  # no project of that name yet
                for run in trackio.Api().runs(target.run):
                    if run.name == name:
                        run.delete()
            config = dict(target.settings)
            self._run = trackio.init(project=target.run, name=name, config=config, resume="never", embed=False)

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """trackio flushes in its own thread."""

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


SINKS: dict[str, Callable[[Target], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""Name in a recipe -> sink. The name is also that of the Python package and of ingot's extra."""


def require(names: Iterable[str]) -> None:
    """Check that sinks exist and are installed, before anything runs.

    Raises:
        UserError: one is unknown, or its package is missing.
    """
    for name in names:
        if name not in SINKS:
            raise UserError(f"found the sink '{name}'; {nearest(name, SINKS)}")
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UserError(f"the sink '{name}' needs the extra {name}; pip install 'ingot[{name}]'")


def open_sink(name: str, target: Target) -> Sink:
    """Open a sink, with the defaults of `QUIET` in the environment."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    return SINKS[name](target)


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """An event's scalars, named as in a dashboard: `step/loss_nats`, `evaluation/val_loss_nats`."""
    prefix = "/".join(filter(None, (record["event"], record.get("model"))))
    return {
        f"{prefix}/{name}": float(value)
        for name, value in record.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def replay(stage: Path, name: str, target: Target) -> int:
    """Send all events that a stage has logged to a sink; returns the number of events with scalars."""
    records = [r for r in read_events(stage / METRICS) if "step" in r and scalars_of(r)]
    if records:
        sink = open_sink(name, target)
        _write_all(sink, records)
        sink.close(failed=False)
    return len(records)


class Sinks:
    """The sinks of a running stage; a listener of its `EventLog`.

    Args:
        names: keys of `SINKS`.
        target: the stage that runs.
        log: its `metrics.jsonl`.
        warn: receives the warning when a sink fails.
    """

    def __init__(self, names: Iterable[str], target: Target, log: Path, warn: Callable[[str], None]):
        self._unopened = list(names)
        self._open: dict[str, Sink] = {}
        self._target, self._log, self._warn = target, log, warn
        self._resumed_step = -1
        self._sent: set[Any] = set()

    def on_event(self, record: Mapping[str, Any]) -> None:
        """Send an event's scalars; the first one opens the sinks."""
        if record["event"] == "resume":
            self._resumed_step = record["after"]
        if "step" not in record or not (scalars := scalars_of(record)):
            return
        if self._unopened:
            self._open_all(record["attempt"])
        if event_id(record) not in self._sent:
            self._each(lambda sink: sink.write(record["step"], record["time"], scalars))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self, failed: bool) -> None:
        """Close all sinks; later events are not sent."""
        self._each(lambda sink: sink.close(failed))
        self._unopened, self._open = [], {}

    def _open_all(self, attempt: int) -> None:
        """Open all sinks and send the steps of earlier attempts up to the resumed checkpoint."""
        before = [r for r in read_events(self._log) if r.get("attempt", 0) < attempt and "step" in r]
        history = [r for r in before if r["step"] <= self._resumed_step and scalars_of(r)]
        self._sent = {event_id(r) for r in history}
        names, self._unopened = self._unopened, []
        for name in names:
            with self._guard(name):
                sink = open_sink(name, self._target)
                _write_all(sink, history)
                self._open[name] = sink

    def _each(self, action: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            with self._guard(name):
                action(sink)

    @contextlib.contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._warn(f"{name}: closed after an error ({reason}); the stage continues, metrics.jsonl is complete")


def _write_all(sink: Sink, records: list[dict[str, Any]]) -> None:
    for record in sorted(records, key=lambda r: r["step"]):
        sink.write(record["step"], record["time"], scalars_of(record))
