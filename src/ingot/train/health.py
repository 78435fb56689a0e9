"""Is the run healthy? Rules on the gradient norm as it was before clipping, judged a window of steps at a time.

After clipping the norm is never above the threshold, so it says nothing. A single long gradient is what clipping is
for; what matters is a threshold that cuts nearly all of them, for then it, and not the gradient, sets the length of
every step, and the learning rate means something else than the recipe says.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Health = Literal["healthy", "always clipped", "critical"]
WINDOW = 100
"""Steps judged together while training."""
FRESH: Mapping[str, Any] = {"now": "healthy", "steps": 0, "clipped": 0}
"""A run's health before its first step: the verdict, and the count of the window so far."""
ADVICE: dict[Health, str] = {
    "healthy": "all norms are finite, and fewer than nine in ten are clipped",
    "always clipped": "nine in ten gradients are cut, so the threshold, not the gradient, sets the length of a step: "
    "raise optim.clip, or lower optim.lr",
    "critical": "a gradient was NaN or infinite, and the run stopped there: lower optim.lr, or look at that batch with "
    "`ingot trace`",
}


def judge(norms: Sequence[float], clip: float) -> Health:
    """`critical` where any norm is NaN or infinite, `always clipped` where nine in ten exceed the threshold."""
    if any(not math.isfinite(n) for n in norms):
        return "critical"
    return _verdict(sum(n > clip for n in norms), len(norms))


def watch(before: Mapping[str, Any], norm: float, clip: float) -> dict[str, Any]:
    """The health after one more step: a new verdict where that completes a window, or at once where it is critical."""
    if not math.isfinite(norm):
        return {**FRESH, "now": "critical"}
    steps, clipped = before["steps"] + 1, before["clipped"] + (norm > clip)
    if steps == WINDOW:
        return {**FRESH, "now": _verdict(clipped, steps)}
    return {"now": before["now"], "steps": steps, "clipped": clipped}


def _verdict(clipped: int, steps: int) -> Health:
    return "always clipped" if steps and clipped >= 0.9 * steps else "healthy"
