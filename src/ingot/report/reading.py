"""Reads a stage's directory as plain data, for the terminal and the page.

A running or interrupted stage lacks some files, and every function then returns what exists so far. No function waits,
locks or writes.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingot.core import artifact
from ingot.core.events import METRICS, read_events
from ingot.report import figures
from ingot.stages.job import ANSWERS, TABLE, in_role

EVENT_FIELDS = ("event", "time", "attempt")
"""Fields of every event, which are no metrics."""
MAX_DROPPED_SAMPLES = 2
"""Dropped documents shown per reason."""
RIGHT_EXAMPLES, WRONG_EXAMPLES = 5, 2
"""Right and wrong answers shown of a task."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's table; empty if the file does not exist."""
    try:
        return artifact.read_json(path)
    except FileNotFoundError:
        return {}


def read_lines(path: Path, max_lines: int | None = None) -> list[dict[str, Any]]:
    """The first tables of a JSONL file (default: all); empty if the file does not exist."""
    try:
        return artifact.read_lines(path, max_lines)
    except FileNotFoundError:
        return []


def record(stage: Path) -> dict[str, Any]:
    """The stage's record, with its name, kind, settings and inputs; empty before it starts."""
    return read_json(stage / artifact.RECORD)


def result(stage: Path) -> dict[str, Any]:
    """The stage's final numbers; empty before it ends."""
    return read_json(stage / artifact.RESULT)


def events(stage: Path, event: str) -> list[dict[str, Any]]:
    """The stage's events of one name, sorted by step if they have one."""
    named = read_events(stage / METRICS, event)
    return sorted(named, key=lambda e: e["step"]) if all("step" in e for e in named) else named


def facts(stage: Path) -> dict[str, Any]:
    """Sizes and plan of a train stage, logged before its first step and repeated in its result."""
    plans = events(stage, "plan")
    return plans[-1] if plans else result(stage)


def evaluations(stage: Path) -> list[dict[str, Any]]:
    """Metrics of every evaluation during training, sorted by step."""
    return numbers(stage, "evaluation")


def numbers(stage: Path, event: str) -> list[dict[str, Any]]:
    """The stage's events of one name as `events` gives them, without the fields that all events have."""
    return [{k: v for k, v in e.items() if k not in EVENT_FIELDS} for e in events(stage, event)]


def samples(stage: Path) -> list[dict[str, Any]]:
    """Generated texts {step | model, prompt, text}; the newest one for each step, model and prompt.

    `between` separates prompt and text: a line break if the text answers the prompt, nothing if it continues it.
    """
    newest = {(e.get("step"), e.get("model"), e["prompt"]): e for e in events(stage, "sample")}
    return [{**e, "between": "\n" if e.get("answer") else ""} for e in newest.values()]


def table(stage: Path) -> list[dict[str, Any]]:
    """Rows {model, task, metric, value, low, high, n} of an evaluate or judge stage."""
    return read_lines(stage / TABLE)


def dropped_samples(stage: Path, per_reason: int = MAX_DROPPED_SAMPLES) -> list[dict[str, Any]]:
    """The first dropped documents of every reason: {source, path, offset, reason, bytes, text}."""
    path = stage / "dropped.parquet"
    if not path.exists():
        return []
    dropped = read_json(stage / "funnel.json").get("dropped", {})
    missing = Counter({reason: min(per_reason, counts["documents"]) for reason, counts in dropped.items()})
    samples = []
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                if not missing.total():
                    break
                for row, reason in enumerate(batch.column("reason").to_pylist()):
                    if missing[reason] > 0:
                        missing[reason] -= 1
                        samples.append({name: batch.column(name)[row].as_py() for name in batch.schema.names})
    except pa.ArrowException:
        raise artifact.damaged(path, "table") from None
    order = list(dropped)
    return sorted(samples, key=lambda sample: order.index(sample["reason"]))


def near_duplicates(stage: Path, most: int = 8) -> dict[str, Any]:
    """The largest clusters of near-duplicates, and pairs of low to high similarity; empty without near-duplicates.

    Returns:
        documents, clusters: counts; largest: [{path, offset, documents}]; pairs: [{path, offset, text, kept_path,
        kept_offset, kept_text, similarity}].
    """
    path = stage / "near_duplicates.parquet"
    if not path.exists():
        return {}
    rows = _parquet_rows(path)
    clusters = Counter((row["kept_source"], row["kept_path"], row["kept_offset"]) for row in rows)
    largest = [{"path": p, "offset": offset, "documents": n + 1} for (_, p, offset), n in clusters.most_common(most)]
    ordered = sorted(rows, key=lambda row: row["similarity"])
    number = min(most, len(ordered))
    chosen = [ordered[round(i * (len(ordered) - 1) / max(1, number - 1))] for i in range(number)]
    return {"documents": len(rows), "clusters": len(clusters), "largest": largest, "pairs": chosen}


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError):
        raise artifact.damaged(path, "table") from None


def contamination(stage: Path, most: int = 20) -> list[dict[str, Any]]:
    """Documents that contain an item of an evaluation: {source, path, offset, item, text}."""
    path = stage / "contamination.parquet"
    if not path.exists():
        return []
    return _parquet_rows(path)[:most]


def quarantined(stage: Path, max_groups: int = 10) -> list[dict[str, Any]]:
    """Inputs that could not be read, grouped by file and reason (ignoring numbers in the reason).

    Returns:
        the first of each group: {source, path, line, offset, bytes, reason, alike}, `alike` the size of the group.
    """
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for record in read_lines(stage / "quarantine.jsonl"):
        group = record["path"], re.sub(r"\d+", "0", record["reason"])
        groups.setdefault(group, {**record, "alike": 0})["alike"] += 1
    return list(groups.values())[:max_groups]


def models(stage: Path) -> list[str]:
    """Names of the models that an evaluate stage evaluates."""
    return list(in_role(record(stage).get("inputs", {}), "model"))


def bits_per_byte(stage: Path) -> dict[str, list[dict[str, Any]]]:
    """Bits per byte in an evaluate stage: corpus -> rows, baselines before models, each in descending order.

    Rows have a further field `reference`, which is true for baselines.
    """
    evaluated = models(stage)
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in table(stage):
        if row["metric"] == "bits_per_byte":
            tasks.setdefault(row["task"], []).append({**row, "reference": row["model"] not in evaluated})
    return {task: sorted(rows, key=lambda r: (not r["reference"], -r["value"])) for task, rows in tasks.items()}


def accuracies(stage: Path) -> dict[str, list[dict[str, Any]]]:
    """Accuracy of an evaluate stage's models: task -> rows, in the order of training where one model began as another.

    Rows have a further field `gain`, the difference to the model it began as; None if that was not evaluated.
    """
    chains = [[link["name"] for link in e["stages"]] for e in events(stage, "chain")]
    before = {name: chain[n - 1] for chain in chains for n, name in enumerate(chain) if n}
    order = [*dict.fromkeys(name for chain in chains for name in chain)]
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for row in table(stage):
        if row["metric"] == "accuracy":
            tasks.setdefault(row["task"], {})[row["model"]] = row
    gains = {}
    for task, rows in tasks.items():
        names = sorted(rows, key=lambda name: order.index(name) if name in order else len(order))
        values = {name: row["value"] for name, row in rows.items()}
        gains[task] = [
            {**rows[name], "gain": values[name] - values[before[name]] if before.get(name) in values else None}
            for name in names
        ]
    return gains


def examples(stage: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Answers of an evaluate stage to items with a known answer, right ones first.

    Returns:
        (task, model) -> some rows {prompt, answer, expected, right}, evenly spaced over the task's items.
    """
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_lines(stage / ANSWERS):
        if row.get("expected"):
            answers.setdefault((row["task"], row["model"]), []).append(row)
    return {
        key: [
            row
            for right, most in ((True, RIGHT_EXAMPLES), (False, WRONG_EXAMPLES))
            for row in figures.evenly_spaced([r for r in rows if r["right"] is right], most)
        ]
        for key, rows in answers.items()
    }


def limitations(stage: Path) -> str:
    """What the models of an evaluate stage cannot do, as its recipe says."""
    return record(stage).get("settings", {}).get("limitations", "")
