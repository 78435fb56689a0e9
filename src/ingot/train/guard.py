"""Is the run healthy? Rules on the gradient norm as it was before clipping."""

import math
from collections.abc import Sequence
from typing import Literal

Health = Literal["healthy", "always clipped", "critical"]


def judge(norms: Sequence[float], clip: float) -> Health:
    """`critical` where any norm is NaN or infinite, `always clipped` where nine in ten exceed the threshold."""
    if any(not math.isfinite(n) for n in norms):
        return "critical"
    if norms and sum(n > clip for n in norms) >= 0.9 * len(norms):
        return "always clipped"
    return "healthy"
