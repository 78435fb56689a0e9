"""`python -m benchmarks generate`: greedy continuations with a KV cache, ours and transformers'.

One row is bound by memory: each token reads every weight once, so bytes of weights over the speed at which the same
process reads memory is the least time a token can take; steps and reading are measured in turn, since neighbours on a
virtual machine halve that speed for seconds or minutes. Many rows share that reading and are bound by arithmetic.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Say
from benchmarks.process import Kept, Result
from benchmarks.train import Measured, alternate

BYTES = {"float32": 4, "bfloat16": 2}
SAME = {"float32": 0.998, "bfloat16": 0.98}
"""Share of equal tokens, of those that continue the same text, from which two greedy continuations count as the same
work: roundings tip a close choice, and what follows it is another text. With random weights bf16 tips .6 to .7 % of
fp32's choices, ours and transformers' alike, and fp32 none of 2,048."""


def measured(
    job: Mapping[str, Any],
    contenders: Sequence[Contender],
    rows: int,
    dtype: str,
    *,
    prompt: int,
    new: int,
    repetitions: int,
    seconds: float,
    kept: Kept,
    say: Say,
    turns: int = 1,
) -> Measured:
    """All contenders on one batch and precision of a prepared shape."""
    more = {"dtype": dtype, "prompt": prompt, "new": new, "seconds": seconds, "seed": 1}
    told = {**job, **more, "shape": {**job["shape"], "rows": rows}}
    results = alternate(contenders, told, repetitions, kept, say, turns=turns)
    for name, found in results.items():
        seconds = statistics.median(r["seconds"] for r in found)
        say(f"{rows} rows, {dtype}, {name}: {rows * new / seconds:,.0f} tok/s")
    return results


def summary(rows: int, dtype: str, new: int, mine: list[Result], theirs: Measured) -> dict[str, Any]:
    """One row: tokens per second, milliseconds a token, how far above the floor, and the ratio to each peer."""
    weights_gb = mine[0]["parameters"] * BYTES[dtype] / 1e9
    turns = [turn for r in mine for turn in r["in_turn"]]
    row: dict[str, Any] = {
        "rows": rows,
        "dtype": dtype,
        "new_tokens": new,
        **_numbers(rows, new, mine),
        "floor_ms": _middle([1000 * weights_gb / read_gb_s for _, read_gb_s in turns], 3),
        "of_floor": _middle([token_s * read_gb_s / weights_gb for token_s, read_gb_s in turns], 3),
        "read_gb_s": _middle([read_gb_s for _, read_gb_s in turns], 1),
        "parameters": mine[0]["parameters"],
        **compare.NO_RATIO,
        **{"peer": None, "peer_tok_s": None, "peers": {}},
    }
    for name, results in theirs.items():
        row["peers"][name] = numbers = _numbers(rows, new, results)
        if differs := difference(mine[0], results[0], SAME[dtype]):
            numbers["differs"] = differs
            continue
        found = compare.parts(compare.ratio([1 / r["seconds"] for r in mine], [1 / r["seconds"] for r in results]))
        numbers |= found
        if row["peer"] is None or numbers["tok_s"] > row["peer_tok_s"]:
            row |= {"peer": name, "peer_tok_s": numbers["tok_s"], **found}
    return row


def _middle(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], share: float) -> str | None:
    """What makes two generations different work: parameters, how many tokens, or which."""
    if ours["parameters"] != theirs["parameters"]:
        return f"parameters: {theirs['parameters']:,} against our {ours['parameters']:,}"
    mine, other = ([len(row) for row in side["tokens"]] for side in (ours, theirs))
    if mine != other:
        return f"new tokens: {sum(other)} against our {sum(mine)}"
    rows = [_compared(*pair) for pair in zip(ours["tokens"], theirs["tokens"], strict=True)]
    same = sum(equal for equal, _ in rows) / sum(seen for _, seen in rows)
    return None if same >= share else f"tokens: {100 * same:.1f} % are ours, expected {100 * share:.1f} % at least"


def _compared(mine: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Equal tokens of a row up to the first that differs, and how many were compared."""
    equal = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
    return (len(mine), len(mine)) if equal is None else (equal, equal + 1)


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
