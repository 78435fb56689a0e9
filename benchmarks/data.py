"""`python -m benchmarks data`: the time to make a batch relative to its step, and the throughput of document cleaning.

Making a batch is measured on the calling thread; in a run it happens on another thread during the step before. The
corpus pipeline is our stage with its defaults against datatrove's executor with the same masking and the same bounds;
ours also removes duplicates and splits. Both are timed inside their process, on all cores.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Log, ours, own_environment
from benchmarks.corpus import write_prose
from benchmarks.process import Result, ResultCache, measure
from benchmarks.shapes import Shape
from benchmarks.train import MIN_STEPS, alternate, prepared_job


def measure_loader(shapes: Sequence[Shape], seconds: float, cache: ResultCache, log: Log) -> dict[str, Any]:
    """Microseconds to make a batch of each shape, also as a fraction (`fraction`) of a training step."""
    rows = {}
    for shape in shapes:
        with prepared_job(replace(shape, checked=2)) as job:
            job = {"seconds": seconds, "least": MIN_STEPS, "precision": "auto", **job}
            step_s = measure(ours("train"), job, cache)["step_s"]
            batch_s = measure(ours("loader"), job, cache)["batch_s"]
        rows[shape.name] = {
            "batch_us": round(1e6 * batch_s, 1),
            "step_ms": round(1e3 * step_s, 2),
            "fraction": round(batch_s / step_s, 5),
        }
        log(f"{shape.name}: a batch takes {1e6 * batch_s:.0f} us of a step of {1e3 * step_s:.1f} ms")
    return rows


def our_corpus() -> Contender:
    """Our corpus stage, in a process that does not load torch."""
    return Contender("ingot", (sys.executable, "-m", "benchmarks.corpus"), own_environment(), ours=True)


def measure_corpus(
    peers: Sequence[Contender], megabytes: float, repetitions: int, cache: ResultCache, log: Log
) -> dict[str, Any]:
    """Megabytes of text per second through the corpus pipeline, ours and the peers', alternately."""
    mine = our_corpus()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
        facts = write_prose(Path(name) / "corpus", megabytes)
        job = {"corpus": str(Path(name) / "corpus"), "bytes": facts["bytes"]}
        measured = alternate([mine, *peers], job, repetitions, cache, log)
    for contender, results in measured.items():
        log(f"corpus, {contender}: {_speed(facts, results):.1f} MB/s")
    return summary(facts, measured.pop(mine.name), measured)


def summary(facts: dict[str, int], mine: list[Result], theirs: dict[str, list[Result]]) -> dict[str, Any]:
    """Speeds, and the ratio to each peer whose pipeline kept and masked the same.

    Args:
        facts: sizes and expected counts, as `write_prose` returns them.
    """
    row: dict[str, Any] = {
        **facts,
        "mb_s": _speed(facts, mine),
        **compare.NO_RATIO,
        "peers": {},
    }
    if differs := difference(facts, mine[0]):
        row["differs"] = differs
    for name, results in theirs.items():
        numbers: dict[str, Any] = {"mb_s": _speed(facts, results)}
        row["peers"][name] = numbers
        if differs := difference(facts, results[0]):
            numbers["differs"] = differs
            continue
        interval = compare.ratio([1 / r["seconds"] for r in mine], [1 / r["seconds"] for r in results])
        columns = compare.ratio_columns(interval)
        numbers |= columns
        row |= {"peer": name, **columns}
    return row


def difference(facts: dict[str, int], result: Result) -> str | None:
    """How the counts of a pipeline differ from the expected ones; None if they are equal."""
    for key in ("kept", "masked"):
        if result[key] != facts[key]:
            return f"{key}: {result[key]:,}, expected {facts[key]:,}"
    return None


def _speed(facts: dict[str, int], results: Sequence[Result]) -> float:
    return round(statistics.median(facts["bytes"] / 1e6 / r["seconds"] for r in results), 2)
