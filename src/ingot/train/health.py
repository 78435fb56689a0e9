"""Health of a run: rules on the gradient norm before clipping, evaluated over windows of steps.

Clipping is for single large gradients. If the threshold is below nearly all gradient norms, it sets the size of every
step in place of the learning rate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Health = Literal["healthy", "always clipped", "critical"]
WINDOW = 100
"""Steps of a window."""
_CLIPPED_FRACTION = 0.9
"""A window with at least this fraction of clipped gradients is "always clipped"."""
INITIAL: Mapping[str, Any] = {"now": "healthy", "steps": 0, "clipped": 0}
"""The state before the first step: verdict, and steps and clipped gradients of the current window."""
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
    """The state after another step. The verdict changes at the end of a window, or at once to `critical`."""
    if not math.isfinite(norm):
        return {**INITIAL, "now": "critical"}
    steps, clipped = before["steps"] + 1, before["clipped"] + (norm > clip)
    if steps == WINDOW:
        return {**INITIAL, "now": _of_window(clipped, steps)}
    return {"now": before["now"], "steps": steps, "clipped": clipped}


def _of_window(clipped: int, steps: int) -> Health:
    return "always clipped" if steps and clipped >= _CLIPPED_FRACTION * steps else "healthy"
