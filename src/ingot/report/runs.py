"""`ingot runs`: the runs below an output root, with the verdict of each."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from ingot.core.errors import shortened
from ingot.pipeline.runs import Run, runs
from ingot.pipeline.status import directory_status
from ingot.report import reading
from ingot.report.html.conclusions import Conclusion, conclusions, group
from ingot.report.html.page import STATES, run_state
from ingot.report.terminal import VERDICT_COLOURS, console, table

_MAX_SENTENCE = 70


def run_rows(root: Path) -> list[dict[str, Any]]:
    """A row for every run, the newest first.

    Returns:
        {name, started (ISO 8601), state, done, stages (counts), decides}: `decides` is {stage, verdict, number,
        sentence} of the last training; without one of the last result, whose verdict is None; None before there is any.
    """
    return [_row(run) for run in runs(root)]


def _row(run: Run) -> dict[str, Any]:
    states = [STATES[directory_status(stage).state] for stage in run.stages.values()]
    return {
        "name": run.path.name,
        "started": datetime.fromtimestamp(run.started).astimezone().isoformat(timespec="seconds"),
        "state": run_state(states),
        "done": states.count("done"),
        "stages": len(states),
        "decides": _deciding(run),
    }


def _deciding(run: Run) -> dict[str, Any] | None:
    done = [(name, stage.path) for name, stage in reversed([*run.stages.items()]) if stage.is_done()]
    results = [(name, stage, reading.result(stage)) for name, stage in done]
    trained = next(((name, stage, result) for name, stage, result in results if "verdict" in result), None)
    if trained:
        name, stage, result = trained
        number = conclusions("train", name, stage)[0].number
        return {"stage": name, "verdict": result["verdict"], "number": number, "sentence": result["verdict_sentence"]}
    first = next(_conclusions(done), None)
    return first and {"stage": first.stage, "verdict": None, "number": first.number, "sentence": first.sentence}


def _conclusions(stages: list[tuple[str, Path]]) -> Iterator[Conclusion]:
    """The conclusions of results, then those of trainings."""
    for heading in ("Results", "Training"):
        for name, stage in stages:
            kind = reading.record(stage).get("kind", "")
            if group(kind) == heading:
                yield from conclusions(kind, name, stage)


def print_runs(rows: list[dict[str, Any]], root: Path) -> None:
    """Print the rows of `run_rows` as a table."""
    if not rows:
        return console().print(f"{root}: no runs", markup=False)
    listed = table("run", "when", "state", "stages", "verdict")
    for row in rows:
        when = datetime.fromisoformat(row["started"]).strftime("%Y-%m-%d %H:%M")
        last, text = row["decides"], Text()
        if last:
            number = "" if last["verdict"] else f"{last['number']} "  # the sentence of a verdict has its numbers
            text.append(f"{last['stage']}: {number}{shortened(last['sentence'], _MAX_SENTENCE)}")
            text.stylize(VERDICT_COLOURS.get(last["verdict"] or "", ""))
        listed.add_row(row["name"], when, row["state"], f"{row['done']} of {row['stages']}", text)
    console().print(listed)
