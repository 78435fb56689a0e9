"""`python -m benchmarks train`: training steps, ours and the peers' alternately, on the same weights and rows."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Say, ours
from benchmarks.inputs import write_ids
from benchmarks.process import Kept, Result, in_turns, measure
from benchmarks.shapes import Shape
from ingot.core.errors import UserError
from ingot.core.settings import settings_tree

LEAST = 4
"""Steps that are timed at least."""
TURNS = 4
"""Windows of a measurement where all contenders are there at once."""
SHARE = 0.75
"""Of the machine's memory that all of them may take together."""

Measured = dict[str, list[Result]]
"""Contender -> a result of each repetition."""


@contextmanager
def prepared(shape: Shape, context: int | None = None) -> Iterator[dict[str, Any]]:
    """The part of a job that is the same for all: the shape, the ids, the initial weights."""
    config = shape.config(context)
    tree = settings_tree(config)
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
        directory = Path(name)
        job = {
            "shape": {**tree, "name": shape.name, "rows": shape.rows, "checked": shape.checked},
            "config": tree,
            "directory": str(directory),
            "weights": str(directory / "weights.pt"),
            **write_ids(shape, directory),
        }
        measure(ours("weights"), job, Kept(None))
        yield job


def alternate(
    contenders: Sequence[Contender],
    job: Mapping[str, Any],
    repetitions: int,
    kept: Kept,
    say: Say,
    label: str = "",
    turns: int = 1,
) -> Measured:
    """Every contender once in each repetition; every other repetition goes through them backwards.

    A peer that fails is told, and left out from then on; training steps are told where there is a label.

    Args:
        turns: how many windows a measurement has, between which the others have theirs; all are there at once then.
    """
    results: Measured = {c.name: [] for c in contenders}
    for repetition in range(repetitions):
        order = [c for c in contenders[:: 1 if repetition % 2 == 0 else -1] if c.name in results]
        for group in [order] if turns > 1 else [[contender] for contender in order]:
            for contender, result in zip(
                group, in_turns(group, {**job, "turns": turns}, kept, repetition), strict=True
            ):
                if isinstance(result, UserError):
                    if contender.ours:
                        raise result
                    say(f"{result}; it is left out")
                    del results[contender.name]
                    continue
                results[contender.name].append(result)
                if label:
                    tok_s = job["shape"]["rows"] * job["shape"]["context"] / result["step_s"]
                    say(f"{label} {repetition + 1}/{repetitions} {contender.name}: {tok_s:,.0f} tok/s")
    return results


def turns(shape: Shape, contenders: int, memory: float) -> int:
    """Windows of a measurement: several where so much memory holds all contenders at once."""
    return TURNS if contenders * shape.memory < SHARE * memory else 1


def measured(
    shape: Shape,
    contenders: Sequence[Contender],
    repetitions: int,
    seconds: float,
    kept: Kept,
    say: Say,
    memory: float,
) -> Measured:
    """All contenders on one shape, in turns where so much memory allows it."""
    with prepared(shape) as job:
        job = {"seconds": seconds, "least": LEAST, "autocast": False, "precision": "auto", **job}
        windows = turns(shape, len(contenders), memory)
        return alternate(contenders, job, repetitions, kept, say, shape.name, windows)


def summary(
    shape: Shape, mine: list[Result], theirs: Measured, peaks: Mapping[str, float], low_precision: bool = False
) -> dict[str, Any]:
    """One shape's row: our numbers, each peer's, and the ratio to the fastest peer that does the same work.

    Args:
        low_precision: the peers compute in bf16 too.
    """
    bf16 = low_precision or mine[0]["precision"] == "bf16"
    band = compare.BAND_BF16 if bf16 else compare.BAND_FP32
    own = compare.speeds(mine, shape.tokens)
    row: dict[str, Any] = {**_numbers(shape, mine, peaks), "execution": mine[0]["execution"]}
    row["precision"] = mine[0]["precision"]
    row |= {**compare.NO_RATIO, "peer": None, "peer_tok_s": None, "peers": {}}
    best = 0.0
    for name, results in theirs.items():
        told = results[0].get("precision") or ("bf16" if low_precision else "fp32")
        numbers = _numbers(shape, results, peaks, told)
        row["peers"][name] = numbers
        if differs := next((d for r in results if (d := compare.difference(mine[0], r, band))), None):
            numbers["differs"] = differs
            continue
        found = compare.parts(compare.ratio(own, compare.speeds(results, shape.tokens)))
        numbers |= found
        if numbers["tok_s"] > best:
            best = numbers["tok_s"]
            row |= {**found, "peer": name, "peer_tok_s": numbers["tok_s"]}
            row |= {"peer_peak_bytes": numbers["peak_bytes"], "loss_band_nats": band}
    return row


def _numbers(
    shape: Shape, results: Sequence[Result], peaks: Mapping[str, float], precision: str | None = None
) -> dict[str, Any]:
    """Speed, spread and memory of one contender, medians over its repetitions."""
    own = compare.speeds(results, shape.tokens)
    step_s = statistics.median(r["step_s"] for r in results)
    gflop_s = results[0]["flops_per_token"] * shape.tokens / step_s / 1e9
    peak = peaks.get(f"gemm_{precision or results[0]['precision']}_gflop_s")
    return {
        "tok_s": round(statistics.median(own)),
        "spread": round(compare.spread(own), 4),
        "step_ms": round(1000 * step_s, 3),
        "p10_ms": round(1000 * statistics.median(r["p10_s"] for r in results), 3),
        "p90_ms": round(1000 * statistics.median(r["p90_s"] for r in results), 3),
        "repetitions": len(results),
        "gflop_s": round(gflop_s, 1),
        "of_peak": compare.rounded(gflop_s / peak if peak else None),
        "peak_bytes": round(statistics.median(r["peak_bytes"] for r in results)),
        "parameters": results[0]["parameters"],
        "loss": round(results[0]["losses"][-1], 5),
        "versions": results[0]["versions"],
    }
