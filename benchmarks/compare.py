"""Is it the same work, and how many times faster: pure functions of measured results.

Repetitions alternate, so what the machine does meanwhile meets both sides of a ratio; each repetition gives one ratio,
and the interval is Student's t over their logarithms (a ratio and its inverse then have mirrored intervals). Rejected:
the ratio of two means with separate spreads, which forgets that neighbours in time were measured together.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.statistics import Interval, mean_interval

Result = Mapping[str, Any]
BAND_FP32 = 0.002
"""Nats between losses of one step, where both sides compute in fp32: they differ by rounding, and by whether gains of
norms decay (found: below 0.0003)."""
BAND_BF16 = 0.03
"""The same where one side computes in bf16."""


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Geometric mean of ours / theirs over paired repetitions, with its 95 % interval (none for one repetition)."""
    log = mean_interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    low, high = (None if x is None else math.exp(x) for x in (log.low, log.high))
    return Interval(math.exp(log.mean), low, high, log.n)


NO_RATIO: Mapping[str, Any] = {"ratio": None, "low": None, "high": None}
"""Before there is a peer with the same work."""


def parts(found: Interval) -> dict[str, float | None]:
    """A ratio and its interval as a table has them."""
    return {"ratio": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}


def difference(ours: Result, theirs: Result, band: float) -> str | None:
    """What makes the work of two training results another, or None where it is the same."""
    for what in ("parameters", "flops_per_token"):
        if ours[what] != theirs[what]:
            return f"{what}: {theirs[what]:,} against our {ours[what]:,}"
    mine, other = ours["versions"]["torch"], theirs["versions"]["torch"]
    if mine.split("+")[0] != other.split("+")[0]:
        return f"torch: {other} against our {mine}"
    if len(ours["losses"]) != len(theirs["losses"]):
        return f"steps compared: {len(theirs['losses'])} against our {len(ours['losses'])}"
    for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1):
        if not abs(a - b) <= band:
            return f"loss of step {step}: {b:.4f} against our {a:.4f}, expected at most {band} apart"
    return None


def speeds(results: Sequence[Result], tokens: int) -> list[float]:
    """Tokens per second of each repetition, by its median step."""
    return [tokens / r["step_s"] for r in results]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how far repetitions lie apart."""
    return (max(values) - min(values)) / statistics.median(values)


def rounded(value: float | None, digits: int = 3) -> float | None:
    """For printing; None stays."""
    return None if value is None else round(value, digits)
