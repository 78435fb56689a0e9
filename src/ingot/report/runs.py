"""`ingot runs`: the runs below an output root, with the number that decides each."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.core.errors import shortened
from ingot.pipeline.runs import Run, runs
from ingot.pipeline.status import directory_status
from ingot.report import reading
from ingot.report.html.conclusions import Conclusion, conclusions, group
from ingot.report.html.page import STATES, run_state
from ingot.report.terminal import console, table

_MAX_SENTENCE = 70


def run_rows(root: Path) -> list[dict[str, Any]]:
    """A row for every run, the newest first.

    Returns:
        {name, started (ISO 8601), state, done, stages (counts), decides}: `decides` is {stage, number, sentence} of the
        last result, or of the last training where nothing was evaluated; None before there is one.
    """
    return [_row(run) for run in runs(root)]


def _row(run: Run) -> dict[str, Any]:
    states = [STATES[directory_status(stage).state] for stage in run.stages.values()]
    decides = next(_deciding(run), None)
    return {
        "name": run.path.name,
        "started": datetime.fromtimestamp(run.started).astimezone().isoformat(timespec="seconds"),
        "state": run_state(states),
        "done": states.count("done"),
        "stages": len(states),
        "decides": decides and {"stage": decides.stage, "number": decides.number, "sentence": decides.sentence},
    }


def _deciding(run: Run) -> Iterator[Conclusion]:
    """The conclusions of results, then those of trainings, each from the last stage on."""
    for heading in ("Results", "Training"):
        for name, stage in reversed([*run.stages.items()]):
            kind = reading.record(stage.path).get("kind", "")
            if stage.is_done() and group(kind) == heading:
                yield from conclusions(kind, name, stage.path)


def print_runs(rows: list[dict[str, Any]], root: Path) -> None:
    """Print the rows of `run_rows` as a table."""
    if not rows:
        return console().print(f"{root}: no runs", markup=False)
    listed = table("run", "when", "state", "stages", "decides")
    for row in rows:
        when = datetime.fromisoformat(row["started"]).strftime("%Y-%m-%d %H:%M")
        decides = row["decides"]
        sentence = shortened(decides["sentence"], _MAX_SENTENCE) if decides else ""
        number = f"{decides['stage']}: {decides['number']} {sentence}" if decides else ""
        listed.add_row(row["name"], when, row["state"], f"{row['done']} of {row['stages']}", number)
    console().print(listed)
