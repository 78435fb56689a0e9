"""Health of a run: rules on the gradient norm before clipping, evaluated over windows of steps.

Clipping is for single large gradients. Norms above the threshold are normal at the beginning of a run and with small
models, and an optimizer that divides by the gradient's size undoes a constant factor. So a window counts as "always
clipped" only where nearly all norms are `FAR` times the threshold: then each step has the same length, however large
its gradient.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Health = Literal["healthy", "always clipped", "critical"]
WINDOW = 100
"""Steps of a window."""
FAR = 10.0
"""Norms above this multiple of the threshold count."""
_CLIPPED_FRACTION = 0.9
"""A window with at least this fraction of counted norms is "always clipped"."""
INITIAL: Mapping[str, Any] = {"now": "healthy", "steps": 0, "clipped": 0}
"""The state before the first step: verdict, and steps and counted norms of the current window."""
ADVICE: dict[Health, str] = {
    "healthy": f"all gradient norms are finite, and less than 90 % of them exceed {FAR:g} times optim.clip",
    "always clipped": f"at least 90 % of the gradient norms exceed {FAR:g} times optim.clip; raise it, or lower "
    "optim.lr",
    "critical": "a gradient was NaN or infinite, and the run stopped there; lower optim.lr, or look at that batch with "
    "`ingot trace`",
}


def verdict(norms: Sequence[float], clip: float) -> Health:
    """`critical` if any norm is NaN or infinite, `always clipped` if 90 % exceed `FAR` times the threshold."""
    if any(not math.isfinite(n) for n in norms):
        return "critical"
    return _of_window(sum(n > FAR * clip for n in norms), len(norms))


def update(before: Mapping[str, Any], norm: float, clip: float) -> dict[str, Any]:
    """The state after another step. The verdict changes at the end of a window, or at once to `critical`."""
    if not math.isfinite(norm):
        return {**INITIAL, "now": "critical"}
    steps, clipped = before["steps"] + 1, before["clipped"] + (norm > FAR * clip)
    if steps == WINDOW:
        return {**INITIAL, "now": _of_window(clipped, steps)}
    return {"now": before["now"], "steps": steps, "clipped": clipped}


def _of_window(clipped: int, steps: int) -> Health:
    return "always clipped" if steps and clipped >= _CLIPPED_FRACTION * steps else "healthy"
