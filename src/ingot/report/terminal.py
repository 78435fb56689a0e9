"""Output of the command line, with the same facts as the page.

Progress goes to standard error, like the stages' progress bars; results go to standard output. Functions named `*_rows`
return plain data, which `--json` prints; functions named `print_*` format it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.core.errors import shortened
from ingot.core.terminal import SafeConsole, error_console
from ingot.objectives.settings import scores_rows
from ingot.pipeline.graph import Graph
from ingot.pipeline.runs import left_out
from ingot.pipeline.status import Status, status
from ingot.pipeline.sweep import label
from ingot.report import figures, reading
from ingot.report.html import panels_forgetting
from ingot.stages.kind import Node
from ingot.stages.models.lineage import trained_on_conversations
from ingot.train.health import repairs

COLOURS = {
    "HIT": "green",
    "RUN": "cyan",
    "RESUME": "yellow",
    "FAILED": "red",
    "RUNNING": "blue",
    "MISSING": "red",
    "WAIT": "magenta",
}
VERDICT_COLOURS = {"nothing learned": "yellow", "worse": "red"}
PIPE_WIDTH = 160
"""Width of files and pipes in characters; rich's default of 80 would wrap log lines."""
RIGHT_ALIGNED = frozenset({"step", "loss", "validation", "tok/s", "ETA", "time"})
"""Columns of numbers."""
MAX_PIECE_CHARACTERS, MAX_SAMPLE_CHARACTERS = 300, 200
"""Characters printed of a document's piece, and of a generated sample."""
MAX_STEPS = 20
"""Steps printed of a document."""


def console(error: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    options: dict[str, Any] = {"width": width, "highlight": False, "markup": False, "soft_wrap": False}
    return error_console(**options) if error else SafeConsole(**options)


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as a table on standard output; the keys of the first row are the columns."""
    if not rows:
        return
    filled = Table(box=None, pad_edge=False)
    for name in rows[0]:
        filled.add_column(name)
    for row in rows:
        filled.add_row(*row.values())
    console().print(filled)


def stage_line(node: Node, now: Status, result: Mapping[str, Any] | None) -> None:
    """Print a line about a stage.

    Args:
        result: its final numbers, with the verdict of a training; None before it runs.
    """
    line = Text(f"{node.name:<16}  ")
    if result is None:
        line.append_text(state_text(now.state)).append(f"  {now.why}")
    else:
        line.append("done", "green").append(f" in {figures.duration(result['seconds'])}")
        if "verdict" in result:
            line.append(f"; {result['verdict_sentence']}", VERDICT_COLOURS.get(result["verdict"], ""))
    console(error=True).print(line, soft_wrap=True)


def print_end(graph: Graph, page: Path) -> None:
    """Print the main results of a run, and the path of the report."""
    out = console()
    for node in graph.nodes.values():
        for line in RESULT_LINES.get(node.kind, _no_lines)(node.name, graph.stage(node).path):
            out.print(line, soft_wrap=True)
    out.print(f"report  {page}", soft_wrap=True)
    if model := _newest_model(graph):
        command = "chat" if trained_on_conversations(graph.stage(model).path) else "generate"
        text = "" if command == "chat" else ' "TEXT"'
        out.print(f"next    ingot {command} {graph.link(model)}{text}", soft_wrap=True)


def _newest_model(graph: Graph) -> Node | None:
    """The last finished train stage whose model generates text."""
    trained = [node for node in graph.nodes.values() if node.kind == "train" and not scores_rows(node.settings)]
    return next((node for node in reversed(trained) if graph.stage(node).is_done()), None)


def _no_lines(name: str, stage: Path) -> Iterator[str | Text]:
    yield from ()


def _train_lines(name: str, stage: Path) -> Iterator[str | Text]:
    result = reading.result(stage)
    if not result:
        return
    loss = result.get("val_loss_nats")
    line = f"{name}: validation loss {figures.nats(loss)} nats, {figures.describe_loss(result)}"
    line = line if loss is not None else f"{name}: no validation"
    unscored = result.get("val_unscored_fraction", 0.0)
    if "val_reward" in result or unscored:
        reward = figures.nats(result["val_reward"]) if "val_reward" in result else "unknown"
        line = f"{name}: reward {reward} of fresh samples on held-out prompts"
        line += f", {unscored:.0%} of which could not be scored" if unscored else ""
    if "bits_per_byte" in result:
        line += f", {figures.nats(result['bits_per_byte'])} bits per byte"
    yield f"{line}; {figures.short(result['tokens'])} tokens trained on in {figures.duration(result['seconds'])}"


def _evaluate_lines(name: str, stage: Path) -> Iterator[str | Text]:
    for task, rows in reading.bits_per_byte(stage).items():
        numbers = ", ".join(f"{row['model']} {figures.nats(row['value'])}" for row in rows)
        yield f"bits per byte on held-out {task}: {numbers}"
    yield from _task_lines(stage)
    yield from panels_forgetting.lines(stage)
    first = {s["model"]: s for s in reversed(reading.samples(stage))}  # the sample of each model's first prompt
    for model, sample in reversed(first.items()):
        written = sample["between"] + shortened(sample["text"], MAX_SAMPLE_CHARACTERS)
        text = Text.assemble("  ", (sample["prompt"], "bold"), written)
        yield f"{model} writes:"
        yield Text("\n  ").join(text.split("\n", allow_blank=True))


def _task_lines(stage: Path) -> Iterator[str | Text]:
    """The accuracy of every model on each task, answers of the best one, and what the models cannot do."""
    examples = reading.examples(stage)
    for task, rows in reading.accuracies(stage).items():
        yield f"accuracy on {task}: {figures.accuracies(rows)}"
        best = max(rows, key=lambda row: row["value"])["model"]
        for row in examples.get((task, best), []):
            prompt, answer, expected = (
                shortened(row[k], MAX_SAMPLE_CHARACTERS) for k in ("prompt", "answer", "expected")
            )
            mark = ("right  ", "green") if row["right"] else ("wrong  ", "red")
            yield Text.assemble(
                "  ", mark, prompt, "  ", (answer, "bold"), "" if row["right"] else f"  expected {expected}"
            )
    if limitations := reading.limitations(stage):
        yield f"limitations: {limitations}"


def _judge_lines(name: str, stage: Path) -> Iterator[str | Text]:
    against = reading.record(stage).get("settings", {}).get("against")
    for row in reading.table(stage):
        if row["metric"] == "win_rate":
            rate, low, high = (f"{row[name]:.0%}" for name in ("value", "low", "high"))
            won = f"{row['model']} wins against {against} in {rate} of {row['n']:,} prompts ({low} to {high})"
            yield f"{won}, a tie counted as half, judged by {row['task']}"


RESULT_LINES: dict[str, Callable[[str, Path], Iterator[str | Text]]] = {
    "train": _train_lines,
    "evaluate": _evaluate_lines,
    "judge": _judge_lines,
}
"""Kind -> (name, directory of a stage) -> the lines that a run prints about the stage at its end."""


def status_rows(graph: Graph) -> list[dict[str, Any]]:
    """The progress of every stage.

    Returns:
        {name, kind, state, why, seconds}; for train stages also {step, phase, steps, loss_nats, val_loss_nats,
        val_reward, tok_s, eta_s, health, repairs, verdict, verdict_sentence}.
    """
    rows, unasked = [], left_out(graph)
    for node in graph.nodes.values():
        now, stage = status(graph, node), graph.stage(node).path
        why = unasked.get(node.name, now.why) if now.state == "RUN" else now.why
        row: dict[str, Any] = {"name": node.name, "kind": node.kind, "state": now.state, "why": why}
        if node.kind == "train":
            row |= _train_progress(stage, now.state)
        row["seconds"] = reading.result(stage).get("seconds")
        rows.append(row)
    return rows


def _train_progress(stage: Path, state: str) -> dict[str, Any]:
    steps, facts = reading.events(stage, "step"), reading.facts(stage)
    # The result replaces the last evaluation, since it is computed on all held-out rows.
    validation = {**(reading.evaluations(stage) or [{}])[-1], **reading.result(stage)}
    last = steps[-1] if steps else {}
    return {
        "step": facts.get("steps", 0) if state == "HIT" else last.get("step", 0),  # not every step is logged
        "phase": last.get("phase"),
        "steps": facts.get("steps"),
        "loss_nats": last.get("loss_nats"),
        "val_loss_nats": validation.get("val_loss_nats"),
        "val_reward": validation.get("val_reward"),
        "tok_s": last.get("tok_s"),
        "eta_s": last.get("eta_s") if state == "RUNNING" else None,
        "health": _health(stage) if steps else None,
        "repairs": repairs(reading.events(stage, "skipped"), reading.events(stage, "rollback")),
        "verdict": validation.get("verdict"),
        "verdict_sentence": validation.get("verdict_sentence"),
    }


def _health(stage: Path) -> str:
    """The newest health of the gradients. Only changes are logged, and a run starts healthy."""
    return next((e["health"] for e in reversed(reading.events(stage, "health"))), "healthy")


def print_status(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `status_rows` as a table."""
    stages = table("stage", "kind", "state", "step", "loss", "validation", "tok/s", "ETA", "time", "why")
    for row in rows:
        step = f"{row['step']:,} / {row['steps']:,}" if row.get("steps") else ""
        step = f"{row['phase']}  {step}" if row.get("phase") else step
        cells = [
            figures.nats(row["loss_nats"]) if row.get("loss_nats") is not None else "",
            _validation(row),
            figures.count(row["tok_s"]) if row.get("tok_s") else "",
            figures.duration(row["eta_s"]) if row.get("eta_s") is not None else "",
            figures.duration(row["seconds"]) if row.get("seconds") is not None else "",
        ]
        health = row["health"] if row.get("health") not in (None, "healthy") else ""
        colour = VERDICT_COLOURS.get(row.get("verdict") or "", "")
        sentence = row["verdict_sentence"] if colour else ""
        why = "; ".join(
            filter(None, ("" if row["state"] == "HIT" else row["why"], health, row.get("repairs"), sentence))
        )
        stages.add_row(row["name"], row["kind"], state_text(row["state"]), step, *cells, Text(why, colour))
    console().print(stages)


def _validation(row: dict[str, Any]) -> str:
    if row.get("val_reward") is not None:
        return f"reward {figures.nats(row['val_reward'])}"
    return figures.nats(row["val_loss_nats"]) if row.get("val_loss_nats") is not None else ""


def print_trace(data: list[dict[str, Any]], step: int, note: str = "") -> None:
    """Print the documents of a batch, row by row.

    Args:
        note: why the step did not update the weights as planned.
    """
    out = console()
    if note:
        out.print(Text(f"step {step:,}: {note}", "yellow"), soft_wrap=True)
    for row in data:
        pieces = row["pieces"]
        documents = f"{len(pieces)} document{'s' if len(pieces) != 1 else ''}"
        heading = f"step {step:,}: {row['source']}, row {row['row']:,}: {documents}, {len(row['ids']):,} tokens"
        out.print(Text(heading, "bold"))
        for piece in pieces:
            at = f" at {piece['offset']:,}" if piece.get("offset") else ""
            span = f"tokens {piece['first_token']:,} to {piece['first_token'] + piece['tokens'] - 1:,}"
            out.print(Text(f"  {piece.get('path', '?')}{at}, {span}", "cyan"), soft_wrap=True)
            out.print(Text(shortened(piece["text"], MAX_PIECE_CHARACTERS), "dim"), soft_wrap=True)


def print_document_steps(data: list[dict[str, Any]]) -> None:
    """Print the steps that train on each document of a file."""
    out = console()
    for row in data:
        at = f" at {row['offset']:,}" if row.get("offset") else ""
        out.print(Text(f"{row['corpus']}: {row['path']}{at}, {row['tokens']:,} tokens", "cyan"), soft_wrap=True)
        steps = row["steps"]
        more = f" and {len(steps) - MAX_STEPS:,} more" if len(steps) > MAX_STEPS else ""
        first = ", ".join(f"{step:,}" for step in steps[:MAX_STEPS])
        out.print(
            f"  in {figures.count(len(steps))} step{'s' if len(steps) != 1 else ''}: {first}{more}", soft_wrap=True
        )


def table(*columns: str, right: Iterable[str] = RIGHT_ALIGNED) -> Table:
    """An empty table without lines.

    Args:
        right: names of right-aligned columns.
    """
    empty = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        justify = "right" if column in right else "left"
        empty.add_column(column, justify=justify, overflow="fold", no_wrap=column in ("stage", "state"))
    return empty


def state_text(state: str) -> Text:
    """A stage's state in its colour."""
    return Text(state, COLOURS.get(state, ""))


class Progress:
    """Prints progress on standard error while a recipe or a sweep runs; a finished stage is printed once per sweep."""

    def __init__(self, graphs: list[Graph], quiet: bool):
        self._points, self._quiet = len(graphs), quiet
        self._printed: set[str] = set()

    def point(self, number: int, graph: Graph, left: float | None) -> None:
        """Print a line before a point of a sweep (a callback of `pipeline.sweep.run_all`).

        Args:
            left: estimated seconds until the end of the sweep.
        """
        if not self._quiet:
            line = f"point {number} of {self._points}  {label(graph)}"
            line += f"  about {figures.duration(left)} left" if left else ""
            console(error=True).print(line, style="bold", soft_wrap=True)

    def stage(self, node: Node, now: Status, result: Mapping[str, Any] | None) -> None:
        """Print a line before and after a stage (a callback of `pipeline.run`); the arguments are `stage_line`'s."""
        if not self._quiet and (now.state != "HIT" or node.key not in self._printed):
            stage_line(node, now, result)
        self._printed.add(node.key)
