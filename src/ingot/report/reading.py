"""What a stage's directory holds, as plain data, for the terminal and the page alike.

Every function takes what is there: a stage that runs, or was interrupted, has no result yet, and a report about it is
read for what it has. Nothing here waits, locks or writes.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingot.core import artifact
from ingot.core.events import METRICS, read_events
from ingot.stages.job import TABLE, in_role

SAMPLES = 2
"""Removed documents shown per reason."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's table; empty where there is none (yet)."""
    try:
        return artifact.read_json(path)
    except FileNotFoundError:
        return {}


def read_lines(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Tables of a JSONL file, at most the first `most`; none where there is no file (yet)."""
    try:
        return artifact.read_lines(path, most)
    except FileNotFoundError:
        return []


def record(stage: Path) -> dict[str, Any]:
    """What the stage was told: name, kind, settings, inputs; empty before it starts."""
    return read_json(stage / artifact.RECORD)


def result(stage: Path) -> dict[str, Any]:
    """The stage's final numbers; empty before it ends."""
    return read_json(stage / artifact.RESULT)


def events(stage: Path, event: str) -> list[dict[str, Any]]:
    """The stage's events of one name, by step where they have one."""
    found = read_events(stage / METRICS, event)
    return sorted(found, key=lambda e: e["step"]) if all("step" in e for e in found) else found


def facts(stage: Path) -> dict[str, Any]:
    """What a train stage announced before its first step (and, when finished, repeats in its result)."""
    planned = events(stage, "plan")
    return planned[-1] if planned else result(stage)


def evaluations(stage: Path) -> list[dict[str, Any]]:
    """Numbers of every evaluation during training, by step, without the event's own fields."""
    own = ("event", "time", "attempt")
    return [{k: v for k, v in e.items() if k not in own} for e in events(stage, "evaluation")]


def samples(stage: Path) -> list[dict[str, Any]]:
    """Generated texts: {step | model, prompt, text}; of several for the same place the newest."""
    newest = {(e.get("step"), e.get("model"), e["prompt"]): e for e in events(stage, "sample")}
    return list(newest.values())


def table(stage: Path) -> list[dict[str, Any]]:
    """Rows {model, task, metric, value, low, high, n} of an evaluate or judge stage."""
    return read_lines(stage / TABLE)


def dropped_samples(stage: Path, each: int = SAMPLES) -> list[dict[str, Any]]:
    """The first removed documents of every reason: {source, path, offset, reason, bytes, text}."""
    path = stage / "dropped.parquet"
    if not path.exists():
        return []
    wanted = read_json(stage / "funnel.json").get("dropped", {})
    missing = Counter({reason: min(each, counts["documents"]) for reason, counts in wanted.items()})
    found = []
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                if not missing.total():
                    break
                for row, reason in enumerate(batch.column("reason").to_pylist()):
                    if missing[reason] > 0:
                        missing[reason] -= 1
                        found.append({name: batch.column(name)[row].as_py() for name in batch.schema.names})
    except pa.ArrowException:
        raise artifact.damaged(path, "table") from None
    order = list(wanted)
    return sorted(found, key=lambda sample: order.index(sample["reason"]))


def quarantined(stage: Path, most: int = 10) -> list[dict[str, Any]]:
    """Things that could not be read, of each file the first of a kind: {source, path, line, offset, bytes, reason}, and
    how many were `alike`, itself included. Reasons that differ in numbers alone are of one kind.
    """
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for record in read_lines(stage / "quarantine.jsonl"):
        kind = record["path"], re.sub(r"\d+", "0", record["reason"])
        kinds.setdefault(kind, {**record, "alike": 0})["alike"] += 1
    return list(kinds.values())[:most]


def models(stage: Path) -> list[str]:
    """The models that an evaluate stage reads, by the names that its table has for them."""
    return list(in_role(record(stage).get("inputs", {}), "model"))


def yardsticks(stage: Path) -> dict[str, list[dict[str, Any]]]:
    """Bits per byte of every corpus in an evaluate stage: references first, each from the most bits to the fewest."""
    rows = [row for row in table(stage) if row["metric"] == "bits_per_byte"]
    judged = models(stage)
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append({**row, "reference": row["model"] not in judged})
    return {task: sorted(found, key=lambda r: (not r["reference"], -r["value"])) for task, found in tasks.items()}
