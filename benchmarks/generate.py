"""`python -m benchmarks generate`: greedy continuations with a KV cache, ours and transformers'.

A single row is bound by memory bandwidth: each token reads every weight once, so a token takes at least the bytes of
weights / the bandwidth. Steps and the bandwidth of the same process are measured in turns, since other virtual machines
can halve the bandwidth for seconds or minutes. Many rows share a read of the weights and are bound by arithmetic.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Log
from benchmarks.process import Result, ResultCache
from benchmarks.train import Measured, alternate

BYTES = {"float32": 4, "bfloat16": 2}
MIN_EQUAL = {"float32": 0.998, "bfloat16": 0.98}
"""Fraction of equal tokens, counted up to the first difference of each row, from which two greedy continuations count
as the same work. Rounding can change a close choice, and everything after it is another text. With random weights bf16
changes .6 to .7 % of the choices of fp32, ours and transformers' alike, and fp32 none of 2,048."""


def measure_batch(
    job: Mapping[str, Any],
    contenders: Sequence[Contender],
    rows: int,
    dtype: str,
    *,
    prompt: int,
    new: int,
    repetitions: int,
    seconds: float,
    cache: ResultCache,
    log: Log,
    windows: int = 1,
) -> Measured:
    """Measure all contenders with one batch size and weight dtype of a prepared job."""
    settings = {"dtype": dtype, "prompt": prompt, "new": new, "seconds": seconds, "seed": 1}
    batch_job = {**job, **settings, "shape": {**job["shape"], "rows": rows}}
    measured = alternate(contenders, batch_job, repetitions, cache, log, windows=windows)
    for name, results in measured.items():
        seconds = statistics.median(r["seconds"] for r in results)
        log(f"{rows} rows, {dtype}, {name}: {rows * new / seconds:,.0f} tok/s")
    return measured


def summary(rows: int, dtype: str, new: int, mine: list[Result], theirs: Measured) -> dict[str, Any]:
    """One row: tokens per second, milliseconds per token, the memory floor (see above), and the ratio to each peer."""
    weights_gb = mine[0]["parameters"] * BYTES[dtype] / 1e9
    turns = [turn for r in mine for turn in r["in_turn"]]
    row: dict[str, Any] = {
        "rows": rows,
        "dtype": dtype,
        "new_tokens": new,
        **_numbers(rows, new, mine),
        "floor_ms": _median([1000 * weights_gb / read_gb_s for _, read_gb_s in turns], 3),
        "of_floor": _median([token_s * read_gb_s / weights_gb for token_s, read_gb_s in turns], 3),
        "read_gb_s": _median([read_gb_s for _, read_gb_s in turns], 1),
        "parameters": mine[0]["parameters"],
        **compare.NO_RATIO,
        **{"peer": None, "peer_tok_s": None, "peers": {}},
    }
    for name, results in theirs.items():
        row["peers"][name] = numbers = _numbers(rows, new, results)
        if differs := difference(mine[0], results[0], MIN_EQUAL[dtype]):
            numbers["differs"] = differs
            continue
        interval = compare.ratio([1 / r["seconds"] for r in mine], [1 / r["seconds"] for r in results])
        columns = compare.ratio_columns(interval)
        numbers |= columns
        if row["peer"] is None or numbers["tok_s"] > row["peer_tok_s"]:
            row |= {"peer": name, "peer_tok_s": numbers["tok_s"], **columns}
    return row


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], min_equal: float) -> str | None:
    """How two generations differ: in parameters, in the number of tokens, or in the tokens; None if equal.

    Args:
        min_equal: a value of `MIN_EQUAL`.
    """
    if ours["parameters"] != theirs["parameters"]:
        return f"parameters: {theirs['parameters']:,} against our {ours['parameters']:,}"
    our_lengths, their_lengths = ([len(row) for row in side["tokens"]] for side in (ours, theirs))
    if our_lengths != their_lengths:
        return f"new tokens: {sum(their_lengths)} against our {sum(our_lengths)}"
    rows = [_equal_tokens(*pair) for pair in zip(ours["tokens"], theirs["tokens"], strict=True)]
    equal = sum(equal for equal, _ in rows) / sum(compared for _, compared in rows)
    if equal >= min_equal:
        return None
    return f"tokens: {100 * equal:.1f} % are ours, expected {100 * min_equal:.1f} % at least"


def _equal_tokens(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    """The number of equal tokens of a row up to the first difference, and the number of compared tokens."""
    equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    return (len(ours), len(ours)) if equal is None else (equal, equal + 1)


def _numbers(rows: int, new: int, results: Sequence[Result]) -> dict[str, Any]:
    speeds = [rows * new / r["seconds"] for r in results]
    return {
        "tok_s": round(statistics.median(speeds), 1),
        "spread": round(compare.spread(speeds), 4),
        "token_ms": round(1000 * statistics.median(r["token_s"] for r in results), 3),
        "first_ms": round(1000 * statistics.median(r["first_s"] for r in results), 2),
        "peak_bytes": round(statistics.median(r["peak_bytes"] for r in results)),
        "repetitions": len(results),
        "versions": results[0]["versions"],
    }
