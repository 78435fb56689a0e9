"""Rules on the gradient norm before clipping, checked over windows of steps.

After clipping the norm never exceeds the threshold, so it says nothing. A single long gradient is what clipping is for;
a threshold that nearly all gradients exceed sets the length of every step in place of the learning rate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Health = Literal["healthy", "always clipped", "critical"]
WINDOW = 100
"""Steps of a window."""
_FRACTION = 0.9
"""Fraction of clipped gradients from which a window is "always clipped"."""
INITIAL: Mapping[str, Any] = {"now": "healthy", "steps": 0, "clipped": 0}
"""Before the first step: the verdict, and the count of the window so far."""
ADVICE: dict[Health, str] = {
    "healthy": "all gradient norms are finite, and less than 90 % of them exceed optim.clip",
    "always clipped": "at least 90 % of the gradient norms exceed optim.clip; raise it, or lower optim.lr",
    "critical": "a gradient was NaN or infinite, and the run stopped there; lower optim.lr, or look at that batch with "
    "`ingot trace`",
}


def verdict(norms: Sequence[float], clip: float) -> Health:
    """`critical` if any norm is NaN or infinite, `always clipped` if 90 % exceed the threshold."""
    if any(not math.isfinite(n) for n in norms):
        return "critical"
    return _of_window(sum(n > clip for n in norms), len(norms))


def update(before: Mapping[str, Any], norm: float, clip: float) -> dict[str, Any]:
    """The health after one more step: a new verdict where that completes a window, at once where it is critical."""
    if not math.isfinite(norm):
        return {**INITIAL, "now": "critical"}
    steps, clipped = before["steps"] + 1, before["clipped"] + (norm > clip)
    if steps == WINDOW:
        return {**INITIAL, "now": _of_window(clipped, steps)}
    return {"now": before["now"], "steps": steps, "clipped": clipped}


def _of_window(clipped: int, steps: int) -> Health:
    return "always clipped" if steps and clipped >= _FRACTION * steps else "healthy"
