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
    "healthy": "gradient norms are finite and not far above optim.clip",
    "always clipped": f"at least 90 % of the gradient norms exceed {FAR:g} times optim.clip; raise it, or lower "
    "optim.lr",
    "critical": "losses or gradients of many steps in a row were NaN or infinite, and the run stopped; lower optim.lr, "
    "or look at a batch with `ingot trace`",
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


def repairs(skipped: Sequence[Mapping[str, Any]], rollbacks: Sequence[Mapping[str, Any]]) -> str:
    """What the guard did in a run (`train/guard.py`), such as "3 steps skipped, the last one 47"; "" for nothing.

    Args:
        skipped: events `skipped`.
        rollbacks: events `rollback`.
    """
    parts = []
    if skipped:
        parts.append(f"{len(skipped):,} step{'s' * (len(skipped) > 1)} skipped, the last one {skipped[-1]['step']:,}")
    for event in rollbacks:
        left_out = f", without steps {event['first']:,} to {event['step']:,}" if "first" in event else ""
        parts.append(f"back to step {event['to']:,}{left_out or ', because a bit flipped'}")
    return "; ".join(parts)


def repair_of(step: int, skipped: Sequence[Mapping[str, Any]], rollbacks: Sequence[Mapping[str, Any]]) -> str:
    """Why a step did not update the weights as planned; "" if it did, or is not made yet.

    Args:
        skipped, rollbacks: as in `repairs`.
    """
    for event in rollbacks:
        if event.get("first", math.inf) <= step <= event["step"]:
            return f"left out, because the run went back to step {event['to']:,}: {event['why']}"
    for event in skipped:
        if event["step"] == step:
            updates = f"{event['updates']} updates skipped" if event["updates"] > 1 else "skipped"
            return f"{updates}, because {event['why']}"
    return ""


def _of_window(clipped: int, steps: int) -> Health:
    return "always clipped" if steps and clipped >= _CLIPPED_FRACTION * steps else "healthy"
