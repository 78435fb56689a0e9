"""Compare measured results: whether two sides did the same work, and the ratio of their speeds. Pure functions.

Contenders alternate, so other load on the machine affects both sides of a ratio. Each repetition gives one ratio, and
the interval is Student's t over their logarithms, so a ratio and its inverse have reciprocal intervals. Paired ratios
are used instead of a ratio of means, because the two sides of a repetition are measured close together in time.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.statistics import Interval, mean_interval

Result = Mapping[str, Any]
BAND_FP32 = 0.002
"""Allowed difference of the losses of a step, in nats, if both sides compute in fp32. They differ by rounding and by
weight decay of norm gains; the largest measured difference is below 0.0003."""
BAND_BF16 = 0.03
"""The same if a side computes in bf16."""


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Geometric mean of ours / theirs over paired repetitions, with its 95 % interval (none for one repetition)."""
    log = mean_interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    low, high = (None if x is None else math.exp(x) for x in (log.low, log.high))
    return Interval(math.exp(log.mean), low, high, log.n)


NO_RATIO: Mapping[str, Any] = {"ratio": None, "low": None, "high": None}
"""The columns if no peer does the same work."""


def ratio_columns(interval: Interval) -> dict[str, float | None]:
    """A ratio and its interval as columns of a table."""
    return {"ratio": rounded(interval.mean), "low": rounded(interval.low), "high": rounded(interval.high)}


def difference(ours: Result, theirs: Result, band: float) -> str | None:
    """How the work of two training results differs; None if it is the same.

    Args:
        band: allowed difference of losses, in nats.
    """
    for key in ("parameters", "flops_per_token"):
        if ours[key] != theirs[key]:
            return f"{key}: {theirs[key]:,} against our {ours[key]:,}"
    our_torch, their_torch = ours["versions"]["torch"], theirs["versions"]["torch"]
    if our_torch.split("+")[0] != their_torch.split("+")[0]:
        return f"torch: {their_torch} against our {our_torch}"
    if len(ours["losses"]) != len(theirs["losses"]):
        return f"steps compared: {len(theirs['losses'])} against our {len(ours['losses'])}"
    for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1):
        if not abs(a - b) <= band:
            return f"loss of step {step}: {b:.4f} against our {a:.4f}, expected at most {band} apart"
    return None


def speeds(results: Sequence[Result], tokens: int) -> list[float]:
    """Tokens per second of each repetition, from its median step.

    Args:
        tokens: tokens per step.
    """
    return [tokens / r["step_s"] for r in results]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median of the repetitions."""
    return (max(values) - min(values)) / statistics.median(values)


def rounded(value: float | None, digits: int = 3) -> float | None:
    """`round` that passes None through."""
    return None if value is None else round(value, digits)
