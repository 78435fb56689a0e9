"""What `ingot.run` returns, and the progress that it prints."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ingot.core.artifact import CHECKPOINTS, checkpoint_path, checkpoint_steps
from ingot.core.errors import printable, shortened
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import Status
from ingot.pipeline.sweep import label
from ingot.report import figures, reading
from ingot.report.terminal import status_rows
from ingot.stages.job import read_result
from ingot.stages.kind import Node

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class StageResult:
    """A finished stage. It is a path (`os.PathLike`), so that whatever takes a stage's directory takes it too."""

    directory: Path

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def numbers(self) -> dict[str, Any]:
        """Content of `result.json`; the names end in units, such as `val_loss_nats`."""
        return read_result(self.directory)

    @property
    def metrics(self) -> "pl.DataFrame":
        """The stage's table: for a train stage a row for each logged step, with the evaluations (`val_...`) in the rows
        of their steps; for an evaluate or judge stage the rows of `table.jsonl`; empty for other kinds."""
        import polars as pl

        rows = reading.table(self.directory)
        if not rows:
            steps: dict[int, dict[str, Any]] = {}
            for numbers in (*reading.numbers(self.directory, "step"), *reading.evaluations(self.directory)):
                steps.setdefault(numbers["step"], {}).update(numbers)
            rows = [steps[step] for step in sorted(steps)]
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the newest checkpoint; None for a stage without a model. `ingot.load` takes the stage itself."""
        root = self.directory / CHECKPOINTS
        return next((checkpoint_path(root, step) for step in checkpoint_steps(root)), None)


@dataclass(frozen=True, repr=False)
class Results(Mapping[str, StageResult]):
    """The stages that a run consists of: `results["base"].numbers`; in a sweep `results["lr=0.001,seed=1/base"]`."""

    report: Path
    """The page of the run."""
    stages: Mapping[str, StageResult] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """The run's directory, with a link to each stage."""
        return self.report.parent

    def __getitem__(self, name: str) -> StageResult:
        return self.stages[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __repr__(self) -> str:
        return "\n".join([*(f"{name}: {stage.directory}" for name, stage in self.items()), f"report: {self.report}"])


class ProgressLines:
    """Prints a line for each stage on standard error. On a terminal and in a notebook the line of a running stage is
    updated in place; elsewhere, such as in a file, a line is printed when a stage starts and when it ends."""

    def __init__(self, graphs: list[Graph], quiet: bool):
        self._graph, self._quiet = graphs[0], quiet
        self._in_place = sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())
        self._printed: set[str] = set()
        self._width = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        if self._width:  # an interrupted stage's line stays
            self._write("", end=True)

    def point(self, _number: int, graph: Graph, _left: float | None) -> None:
        """The next point of a sweep begins (a callback of `pipeline.sweep.run_all`)."""
        self._graph = graph

    def stage(self, node: Node, now: Status, result: Mapping[str, Any] | None) -> None:
        """A stage begins, or has ended with these numbers (a callback of `pipeline.run`)."""
        self._stop()
        name = "/".join(filter(None, (label(self._graph), node.name)))
        if result is not None:
            learned = f"; {result['verdict_sentence']}" if "verdict" in result else ""
            self._write(f"{name}: done in {figures.duration(result['seconds'])}{learned}", end=True)
        elif now.state != "HIT":
            self._write(f"{name}: {now.state}, {now.why}", end=not self._in_place)
            if self._in_place and not self._quiet:
                self._ended.clear()
                self._thread = threading.Thread(target=self._follow, args=(name, node), daemon=True)
                self._thread.start()
        elif node.key not in self._printed:
            self._write(f"{name}: HIT, {now.why}", end=True)
        self._printed.add(node.key)

    def _follow(self, name: str, node: Node) -> None:
        """Update the line of a running stage until it ends."""
        start, pause = time.monotonic(), 1.0
        while not self._ended.wait(pause):
            before = time.monotonic()
            self._write(f"{name}: {_progress(self._graph, node)}{figures.duration(before - start)}")
            pause = max(1.0, 20 * (time.monotonic() - before))  # a long log takes a while to read

    def _stop(self) -> None:
        if self._thread:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _write(self, text: str, end: bool = False) -> None:
        if self._quiet or sys.stderr is None:
            return
        text = printable(text)
        if not end:
            text = shortened(text, shutil.get_terminal_size().columns - 1)  # a longer one cannot be written over
        line = f"\r{text.ljust(self._width)}" if self._in_place and text else text
        print(line, end="\n" if end else "", file=sys.stderr, flush=True)
        self._width = 0 if end else len(text)


def _progress(graph: Graph, node: Node) -> str:
    """Step, loss and remaining time of a running train stage; empty before its first step and for other kinds."""
    (row,) = (row for row in status_rows(graph) if row["name"] == node.name)
    if not row.get("step"):
        return ""
    loss = f"loss {figures.nats(row['loss_nats'])}, " if row["loss_nats"] is not None else ""
    left = f"ETA {figures.duration(row['eta_s'])}, " if row["eta_s"] is not None else ""
    return f"step {row['step']:,} / {row['steps']:,}, {loss}{left}"


def _in_notebook() -> bool:
    """Whether IPython runs this process, as in a notebook; it is never imported here."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None
