"""`python -m benchmarks data`: what a batch costs beside its step, and how fast documents are cleaned.

A batch is measured where the training process makes it, on the calling thread; in a run it is made on another one while
the step before it computes. The corpus chain is our stage with its defaults against datatrove's executor with the same
masking and the same bounds; ours also finds duplicates and splits. Both are timed inside their process, on all cores.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Say, environment, ours
from benchmarks.corpus import write_prose
from benchmarks.process import Kept, Result, measure
from benchmarks.shapes import Shape
from benchmarks.train import LEAST, alternate, prepared


def loader(shapes: Sequence[Shape], seconds: float, kept: Kept, say: Say) -> dict[str, Any]:
    """Microseconds to make a batch of each shape, and their share of a training step."""
    rows = {}
    for shape in shapes:
        with prepared(replace(shape, checked=2)) as job:
            job = {"seconds": seconds, "least": LEAST, "precision": "auto", **job}
            step_s = measure(ours("train"), job, kept)["step_s"]
            batch_s = measure(ours("loader"), job, kept)["batch_s"]
        rows[shape.name] = {
            "batch_us": round(1e6 * batch_s, 1),
            "step_ms": round(1e3 * step_s, 2),
            "share": round(batch_s / step_s, 5),
        }
        say(f"{shape.name}: a batch takes {1e6 * batch_s:.0f} us of a step of {1e3 * step_s:.1f} ms")
    return rows


def our_corpus() -> Contender:
    """The corpus stage in a process of its own; torch is never loaded in it."""
    return Contender("ingot", (sys.executable, "-m", "benchmarks.corpus"), environment(), ours=True)


def corpus(peers: Sequence[Contender], megabytes: float, repetitions: int, kept: Kept, say: Say) -> dict[str, Any]:
    """Megabytes of text a second through the chain, ours and the peers', alternately."""
    mine = our_corpus()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
        facts = write_prose(Path(name) / "corpus", megabytes)
        job = {"corpus": str(Path(name) / "corpus"), "bytes": facts["bytes"]}
        found = alternate([mine, *peers], job, repetitions, kept, say)
    for who, results in found.items():
        say(f"corpus, {who}: {_speed(facts, results):.1f} MB/s")
    return summary(facts, found.pop(mine.name), found)


def summary(facts: dict[str, int], mine: list[Result], theirs: dict[str, list[Result]]) -> dict[str, Any]:
    """Speeds, and the ratio to each peer whose chain kept and masked the same."""
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
        found = compare.parts(compare.ratio([1 / r["seconds"] for r in mine], [1 / r["seconds"] for r in results]))
        numbers |= found
        row |= {"peer": name, **found}
    return row


def difference(facts: dict[str, int], result: Result) -> str | None:
    """What a chain did otherwise than the documents ask for."""
    for what in ("kept", "masked"):
        if result[what] != facts[what]:
            return f"{what}: {result[what]:,}, expected {facts[what]:,}"
    return None


def _speed(facts: dict[str, int], results: Sequence[Result]) -> float:
    return round(statistics.median(facts["bytes"] / 1e6 / r["seconds"] for r in results), 2)
