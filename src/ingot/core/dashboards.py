"""Other programs' dashboards as readers of the event log: TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` stays the truth. A sink is handed what the log says, `step/loss_nats = 3.2 at step 10`, by the process
that writes the log, and never the other way round: one that fails is left out with a warning and training goes on.

An interrupted stage is shown once. When the first number of an attempt arrives, the sink is opened and given the log's
earlier steps, up to the checkpoint that the attempt goes on from; so a dashboard has what the log has, even where the
killed process had not passed everything on. (Purging a file's tail instead, as SummaryWriter's `purge_step` does,
mends the repeated steps and not the lost ones.)

Nothing leaves this machine unless the user's own environment says so (WANDB_MODE, TRACKIO_SPACE_ID). To add a sink:
a class and one line in `SINKS`.
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
from ingot.core.events import METRICS, identity, read_events

QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""What these programs are told where the user's environment says nothing: no network, no reports, no chatter."""

_OWN = frozenset({"event", "time", "attempt", "step", "model"})


@dataclass(frozen=True)
class Target:
    """Whose numbers these are."""

    root: Path
    """Output root."""
    run: str
    """Name of the run: the project of a dashboard."""
    label: str
    """The stage below it: `base`, or `lr=0.001,seed=1/base` in a sweep."""
    kind: str
    key: str
    settings: Mapping[str, Any]


class Sink(Protocol):
    """Takes numbers by step; any exception of its methods ends it and nothing else."""

    def write(self, step: int, wall_time: float, numbers: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in `ROOT/tensorboard/RUN/LABEL`, written with the tensorboard package alone.

    Its own EventFileWriter was rejected: it imports tensorflow where that is installed, beside torch.
    """

    def __init__(self, target: Target):
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        directory = target.root / "tensorboard" / target.run / target.label
        directory.mkdir(parents=True, exist_ok=True)
        for before in directory.glob("events.out.tfevents.*.ingot"):
            before.unlink()  # the new file begins with all that they held
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.ingot"
        self._records = RecordWriter((directory / name).open("wb"))
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        event = self._event(step=step, wall_time=wall_time, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self, failed: bool) -> None:
        self._records.close()


class WandB:
    """A run of Weights & Biases whose id is the stage's key: offline in `ROOT/wandb` unless WANDB_MODE says else.

    Offline, the newest directory of an id holds the whole run. Online, the server's run of that id goes on, and steps
    that it has already are not sent again.
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

    def write(self, step: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        if step >= self._first:
            self._run.log(dict(numbers), step=step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio's local store (`trackio show --project RUN`), written anew by each attempt."""

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

    def write(self, step: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


SINKS: dict[str, Callable[[Target], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""Name in a recipe -> sink; the name is that of its package and of the extra that brings it."""


def require(names: Iterable[str]) -> None:
    """Refuse sinks that do not exist or are not installed, before anything runs.

    Raises:
        UserError: which one, and how to get it.
    """
    for name in names:
        if name not in SINKS:
            raise UserError(f"found the sink '{name}'; {nearest(name, SINKS)}")
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UserError(f"the sink '{name}' needs the extra {name}; pip install 'ingot[{name}]'")


def open_sink(name: str, target: Target) -> Sink:
    """Start a sink, with quiet defaults where the environment has no say."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    return SINKS[name](target)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """An event's numbers under the names that dashboards show: `step/loss_nats`, `evaluation/val_loss_nats`."""
    prefix = "/".join(filter(None, (record["event"], record.get("model"))))
    return {
        f"{prefix}/{name}": float(value)
        for name, value in record.items()
        if name not in _OWN and isinstance(value, int | float) and not isinstance(value, bool)
    }


def replay(stage: Path, name: str, target: Target) -> int:
    """Give a sink all that a stage has logged; returns the number of events that had numbers."""
    records = [r for r in read_events(stage / METRICS) if "step" in r and numbers_of(r)]
    if records:
        sink = open_sink(name, target)
        _give(sink, records)
        sink.close(failed=False)
    return len(records)


class Sinks:
    """The sinks of a stage that runs; `EventLog` calls `follow` with every event it has written."""

    def __init__(self, names: Iterable[str], target: Target, log: Path, warn: Callable[[str], None]):
        self._waiting = list(names)
        self._open: dict[str, Sink] = {}
        self._target, self._log, self._warn = target, log, warn
        self._after = -1
        self._known: set[Any] = set()

    def follow(self, record: Mapping[str, Any]) -> None:
        """Pass an event on."""
        if record["event"] == "resume":
            self._after = record["after"]
        if "step" not in record or not (numbers := numbers_of(record)):
            return
        if self._waiting:
            self._begin(record["attempt"])
        if identity(record) not in self._known:
            self._each(lambda sink: sink.write(record["step"], record["time"], numbers))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self, failed: bool) -> None:
        """The stage has ended; what it still logs is for the log alone."""
        self._each(lambda sink: sink.close(failed))
        self._waiting, self._open = [], {}

    def _begin(self, attempt: int) -> None:
        """Open all sinks and give them the steps before the checkpoint that this attempt goes on from."""
        before = [r for r in read_events(self._log) if r["attempt"] < attempt and "step" in r]
        history = [r for r in before if r["step"] <= self._after and numbers_of(r)]
        self._known = {identity(r) for r in history}
        names, self._waiting = self._waiting, []
        for name in names:
            with self._guard(name):
                sink = open_sink(name, self._target)
                _give(sink, history)
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
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            self._warn(f"{name} gets no more numbers ({words}); the stage goes on, metrics.jsonl has them all")


def _give(sink: Sink, records: list[dict[str, Any]]) -> None:
    for record in sorted(records, key=lambda r: r["step"]):
        sink.write(record["step"], record["time"], numbers_of(record))
