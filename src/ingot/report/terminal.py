"""What the command line prints: tables and lines, the same facts as the page.

Progress goes to standard error, where the stages' own bars are; answers go to standard output. Rows are plain data
first (`--json` prints those), and a table of them second.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.core.errors import shortened
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import Status, status
from ingot.pipeline.sweep import label
from ingot.report import figures, reading
from ingot.report.html import panels_forgetting
from ingot.stages.kind import Node

COLOURS = {
    "HIT": "green",
    "RUN": "cyan",
    "RESUME": "yellow",
    "FAILED": "red",
    "RUNNING": "blue",
    "MISSING": "red",
    "WAIT": "magenta",
}
PIPE_WIDTH = 160
"""Columns where no terminal says how many: a log should not be cut at 80."""
NUMBERS = frozenset({"step", "loss", "validation", "tok/s", "ETA", "time"})
"""Columns that are numbers."""
PIECE_CHARACTERS, SAMPLE_CHARACTERS = 300, 200
"""How much of a text is printed."""
STEPS_SHOWN = 20


def console(error: bool = False) -> Console:
    """Standard output (or error), wide where it is a file or a pipe."""
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=error, width=width, highlight=False, markup=False, soft_wrap=False)


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as a table on standard output; the keys of the first row are the columns."""
    if not rows:
        return
    shown = Table(box=None, pad_edge=False)
    for name in rows[0]:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*row.values())
    console().print(shown)


def stage_line(node: Node, now: Status, seconds: float | None) -> None:
    """One line before a stage, and one after it where it ran (the callback of `pipeline.run`)."""
    line = Text(f"{node.name:<16}  ")
    if seconds is None:
        line.append_text(state_text(now.state)).append(f"  {now.why}")
    else:
        line.append("done", "green").append(f" in {figures.duration(seconds)}")
    console(error=True).print(line, soft_wrap=True)


def print_end(graph: Graph, page: Path) -> None:
    """The most important numbers, a sample, and the path of the report."""
    out = console()
    for node in graph.nodes.values():
        stage = graph.stage(node).path
        if node.kind == "train":
            _print_train(out, node.name, stage)
        if node.kind == "evaluate":
            _print_evaluate(out, stage)
        if node.kind == "judge":
            _print_verdict(out, stage)
    out.print(f"report  {page}", soft_wrap=True)


def _print_train(out: Console, name: str, stage: Path) -> None:
    result = reading.result(stage)
    if not result:
        return
    loss = result.get("val_loss_nats")
    line = f"{name}: validation loss {figures.nats(loss)} nats, {figures.meaning(result)}"
    unscored = result.get("val_unscored_share", 0.0)
    if "val_reward" in result or unscored:
        reward = figures.nats(result["val_reward"]) if "val_reward" in result else "unknown"
        line = f"{name}: reward {reward} of fresh samples on held-out prompts"
        line += f", {unscored:.0%} of which could not be scored" if unscored else ""
    if "bits_per_byte" in result:
        line += f", {figures.nats(result['bits_per_byte'])} bits per byte"
    out.print(
        f"{line}; {figures.short(result['tokens'])} tokens trained on in {figures.duration(result['seconds'])}",
        soft_wrap=True,
    )


def _print_evaluate(out: Console, stage: Path) -> None:
    for task, rows in reading.yardsticks(stage).items():
        numbers = ", ".join(f"{row['model']} {figures.nats(row['value'])}" for row in rows)
        out.print(f"bits per byte on held-out {task}: {numbers}", soft_wrap=True)
    for line in panels_forgetting.lines(stage):
        out.print(line, soft_wrap=True)
    newest = {s["model"]: s for s in reversed(reading.samples(stage))}  # the first prompt of each model
    for model, sample in reversed(newest.items()):
        text = Text.assemble("  ", (sample["prompt"], "bold"), shortened(sample["text"], SAMPLE_CHARACTERS))
        out.print(f"{model} writes:")
        out.print(Text("\n  ").join(text.split("\n", allow_blank=True)), soft_wrap=True)


def _print_verdict(out: Console, stage: Path) -> None:
    against = reading.record(stage).get("settings", {}).get("against")
    for row in reading.table(stage):
        if row["metric"] == "win_rate":
            share, low, high = (f"{row[name]:.0%}" for name in ("value", "low", "high"))
            won = f"{row['model']} beats {against} in {share} of {row['n']:,} prompts ({low} to {high})"
            out.print(f"{won}, says {row['task']}", soft_wrap=True)


def status_rows(graph: Graph) -> list[dict[str, Any]]:
    """How far every stage is: {name, kind, state, why, seconds}; of train stages also {step, phase, steps,
    loss_nats, val_loss_nats, val_reward, tok_s, eta_s, health}.
    """
    rows = []
    for node in graph.nodes.values():
        now, stage = status(graph, node), graph.stage(node).path
        row: dict[str, Any] = {"name": node.name, "kind": node.kind, "state": now.state, "why": now.why}
        if node.kind == "train":
            row |= _train_progress(stage, now.state)
        row["seconds"] = reading.result(stage).get("seconds")
        rows.append(row)
    return rows


def _train_progress(stage: Path, state: str) -> dict[str, Any]:
    steps, facts = reading.events(stage, "step"), reading.facts(stage)
    judged = {**(reading.evaluations(stage) or [{}])[-1], **reading.result(stage)}  # at the end on all held-out rows
    last = steps[-1] if steps else {}
    rate, share = last.get("tok_s") or 0, _share_done(stage, last.get("step", 0), facts.get("steps", 0))
    left = last.get("tokens_seen", 0) * (1 / share - 1) if share else 0.0
    eta = left / rate if state == "RUNNING" and rate and share else None
    return {
        "step": last.get("step", 0),
        "phase": last.get("phase"),
        "steps": facts.get("steps"),
        "loss_nats": last.get("loss_nats"),
        "val_loss_nats": judged.get("val_loss_nats"),
        "val_reward": judged.get("val_reward"),
        "tok_s": last.get("tok_s"),
        "eta_s": eta,
        "health": _health(stage) if steps else None,
    }


def _share_done(stage: Path, step: int, steps: int) -> float:
    """How much of all rows, counted in tokens, the steps so far have had; of a batch that grows, about."""
    phases = {e["name"]: e for e in reading.events(stage, "phase")}.values()  # of several attempts the newest
    whole = sum(_row_tokens(phase, phase["last_step"]) for phase in phases)
    if not whole:
        return step / steps if steps else 0.0
    return sum(_row_tokens(phase, step) for phase in phases) / whole


def _row_tokens(phase: Mapping[str, Any], step: int) -> float:
    """Of a phase's rows up to a step."""
    steps = phase["last_step"] - phase["first_step"] + 1
    made = min(max(0, step - phase["first_step"] + 1), steps)
    grown = (phase["last_rows"] - phase["rows"]) / steps
    return made * (phase["rows"] + grown * made / 2) * phase["context"]


def _health(stage: Path) -> str:
    """The newest verdict on the gradients; only changes are events, and a run begins healthy."""
    return next((e["health"] for e in reversed(reading.events(stage, "health"))), "healthy")


def print_status(rows: list[dict[str, Any]]) -> None:
    """The status as a table."""
    shown = table("stage", "kind", "state", "step", "loss", "validation", "tok/s", "ETA", "time", "why")
    for row in rows:
        step = f"{row['step']:,} / {row['steps']:,}" if row.get("steps") else ""
        step = f"{row['phase']}  {step}" if row.get("phase") else step
        spelled = [
            figures.nats(row["loss_nats"]) if row.get("loss_nats") is not None else "",
            _validation(row),
            figures.count(row["tok_s"]) if row.get("tok_s") else "",
            figures.duration(row["eta_s"]) if row.get("eta_s") is not None else "",
            figures.duration(row["seconds"]) if row.get("seconds") is not None else "",
        ]
        worry = row["health"] if row.get("health") not in (None, "healthy") else ""
        why = "; ".join(filter(None, ("" if row["state"] == "HIT" else row["why"], worry)))
        shown.add_row(row["name"], row["kind"], state_text(row["state"]), step, *spelled, why)
    console().print(shown)


def _validation(row: dict[str, Any]) -> str:
    if row.get("val_reward") is not None:
        return f"reward {figures.nats(row['val_reward'])}"
    return figures.nats(row["val_loss_nats"]) if row.get("val_loss_nats") is not None else ""


def print_trace(data: list[dict[str, Any]], step: int) -> None:
    """The documents of a batch, row by row."""
    out = console()
    for row in data:
        pieces = row["pieces"]
        many = f"{len(pieces)} document{'s' if len(pieces) != 1 else ''}"
        out.print(
            Text(f"step {step:,}: {row['source']}, row {row['row']:,}: {many}, {len(row['ids']):,} tokens", "bold")
        )
        for piece in pieces:
            at = f" at {piece['offset']:,}" if piece.get("offset") else ""
            span = f"tokens {piece['first_token']:,} to {piece['first_token'] + piece['tokens'] - 1:,}"
            out.print(Text(f"  {piece.get('path', '?')}{at}, {span}", "cyan"), soft_wrap=True)
            out.print(Text(shortened(piece["text"], PIECE_CHARACTERS), "dim"), soft_wrap=True)


def print_document_steps(data: list[dict[str, Any]]) -> None:
    """The steps of each document of a file."""
    out = console()
    for row in data:
        at = f" at {row['offset']:,}" if row.get("offset") else ""
        out.print(Text(f"{row['corpus']}: {row['path']}{at}, {row['tokens']:,} tokens", "cyan"), soft_wrap=True)
        steps = row["steps"]
        more = f" and {len(steps) - STEPS_SHOWN:,} more" if len(steps) > STEPS_SHOWN else ""
        shown = ", ".join(f"{step:,}" for step in steps[:STEPS_SHOWN])
        out.print(f"  in {figures.count(len(steps))} steps: {shown}{more}" if steps else "  in no step", soft_wrap=True)


def table(*columns: str, right: Iterable[str] = NUMBERS) -> Table:
    """An empty table without lines; `right` names the columns of numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in ("stage", "state"))
    return made


def state_text(state: str) -> Text:
    """A stage's state in its colour."""
    return Text(state, COLOURS.get(state, ""))


class Progress:
    """Lines on standard error while a recipe runs; of a sweep also `point 3 of 6`, and what all share only once."""

    def __init__(self, graphs: list[Graph], quiet: bool):
        self._points, self._quiet = len(graphs), quiet
        self._told: set[str] = set()

    def point(self, number: int, graph: Graph, left: float | None) -> None:
        """Before a point (the callback of `pipeline.points`)."""
        if not self._quiet:
            line = f"point {number} of {self._points}  {label(graph)}"
            line += f"  about {figures.duration(left)} left" if left else ""
            console(error=True).print(line, style="bold", soft_wrap=True)

    def stage(self, node: Node, now: Status, seconds: float | None) -> None:
        """Before a stage and after it (the callback of `pipeline.run`)."""
        if not self._quiet and (now.state != "HIT" or node.key not in self._told):
            stage_line(node, now, seconds)
        self._told.add(node.key)
