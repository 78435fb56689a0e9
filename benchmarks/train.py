"""`python -m benchmarks train`: training steps, ours and the peers' alternately, with the same weights and rows."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Log, ours
from benchmarks.inputs import write_ids
from benchmarks.process import Result, ResultCache, measure, measure_in_turns
from benchmarks.shapes import Shape
from ingot.core.errors import UserError
from ingot.core.settings import settings_tree

MIN_STEPS = 4
"""Fewest timed steps."""
MAX_WINDOWS = 4
"""Timed windows of a measurement if all contenders fit into memory together."""
MAX_MEMORY_FRACTION = 0.75
"""Fraction of the machine's memory that all contenders together may use."""

Measured = dict[str, list[Result]]
"""Contender's name -> a result of each repetition."""


@contextmanager
def prepared_job(shape: Shape, context: int | None = None) -> Iterator[dict[str, Any]]:
    """The fields of a job that all contenders share: the shape, the ids, the initial weights; with temporary files."""
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
        measure(ours("weights"), job, ResultCache(None))
        yield job


def alternate(
    contenders: Sequence[Contender],
    job: Mapping[str, Any],
    repetitions: int,
    cache: ResultCache,
    log: Log,
    label: str = "",
    windows: int = 1,
) -> Measured:
    """Measure every contender once in each repetition; consecutive repetitions have opposite orders.

    A peer that fails is logged and left out from then on.

    Args:
        label: if set, the speed of each training measurement is logged under it.
        windows: timed windows of a measurement. With several, all contenders run at once and take turns.
    """
    measured: Measured = {c.name: [] for c in contenders}
    for repetition in range(repetitions):
        order = [c for c in contenders[:: 1 if repetition % 2 == 0 else -1] if c.name in measured]
        for group in [order] if windows > 1 else [[contender] for contender in order]:
            results = measure_in_turns(group, {**job, "turns": windows}, cache, repetition)
            for contender, result in zip(group, results, strict=True):
                if isinstance(result, UserError):
                    if contender.ours:
                        raise result
                    log(f"{result}; it is left out")
                    del measured[contender.name]
                    continue
                measured[contender.name].append(result)
                if label:
                    tok_s = job["shape"]["rows"] * job["shape"]["context"] / result["step_s"]
                    log(f"{label} {repetition + 1}/{repetitions} {contender.name}: {tok_s:,.0f} tok/s")
    return measured


def windows(shape: Shape, contenders: int, memory: float) -> int:
    """Timed windows of a measurement: several if `memory` bytes hold all contenders at once, else one."""
    return MAX_WINDOWS if contenders * shape.memory < MAX_MEMORY_FRACTION * memory else 1


def measure_shape(
    shape: Shape,
    contenders: Sequence[Contender],
    repetitions: int,
    seconds: float,
    cache: ResultCache,
    log: Log,
    memory: float,
) -> Measured:
    """Measure all contenders at one shape, in turns if `memory` bytes hold all of them."""
    with prepared_job(shape) as job:
        job = {"seconds": seconds, "least": MIN_STEPS, "autocast": False, "precision": "auto", **job}
        count = windows(shape, len(contenders), memory)
        return alternate(contenders, job, repetitions, cache, log, shape.name, count)


def summary(
    shape: Shape, mine: list[Result], theirs: Measured, peaks: Mapping[str, float], low_precision: bool = False
) -> dict[str, Any]:
    """One shape's row: our numbers, each peer's, and the ratio to the fastest peer that does the same work.

    Args:
        peaks: peak rates, as `machine.describe` returns them.
        low_precision: whether the peers use bf16 autocast.
    """
    bf16 = low_precision or mine[0]["precision"] == "bf16"
    band = compare.BAND_BF16 if bf16 else compare.BAND_FP32
    own = compare.speeds(mine, shape.tokens)
    row: dict[str, Any] = {**_numbers(shape, mine, peaks), "execution": mine[0]["execution"]}
    row["precision"] = mine[0]["precision"]
    row |= {**compare.NO_RATIO, "peer": None, "peer_tok_s": None, "peers": {}}
    best = 0.0
    for name, results in theirs.items():
        precision = results[0].get("precision") or ("bf16" if low_precision else "fp32")
        numbers = _numbers(shape, results, peaks, precision)
        row["peers"][name] = numbers
        if differs := next((d for r in results if (d := compare.difference(mine[0], r, band))), None):
            numbers["differs"] = differs
            continue
        columns = compare.ratio_columns(compare.ratio(own, compare.speeds(results, shape.tokens)))
        numbers |= columns
        if numbers["tok_s"] > best:
            best = numbers["tok_s"]
            row |= {**columns, "peer": name, "peer_tok_s": numbers["tok_s"]}
            row |= {"peer_peak_bytes": numbers["peak_bytes"], "loss_band_nats": band}
    return row


def _numbers(
    shape: Shape, results: Sequence[Result], peaks: Mapping[str, float], precision: str | None = None
) -> dict[str, Any]:
    """Speed, spread and memory of one contender, as medians over its repetitions."""
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
