"""The learning rate as a pure function of the 1-based step.

Linear warmup to the peak, then what the kind says. Every joint is continuous and nothing climbs again past the end.
Steps count from 1, so the first update moves.

* cosine: Loshchilov and Hutter 2017 (SGDR), eq. 5, without restarts and counted from the end of the warmup. (With
  t / T in place of (t - W) / (D - W) it drops from 3e-4 to 2.929e-4 at the joint for W = 1k, T = 10k.)
* linear: peak * (1 - t / T) with a floor, counted the same way.
* wsd: warmup, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395); the decay's shape `sqrt`, 1 - sqrt(progress),
  did best in Hagele et al. 2024 (arXiv:2405.18392).
* inverse-sqrt: peak * sqrt(W / t) (Vaswani et al. 2017, eq. 3), not below the floor.
* constant: the peak.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ingot.core.errors import UserError
from ingot.optim.settings import OptimSettings

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Progress of a decay, 0 to 1, to the share of the way that is left, 1 to 0."""


@dataclass(frozen=True)
class Schedule:
    """Linear warmup over `warmup` steps to `peak`, then `kind` down to `floor` at step `end`, then the floor."""

    kind: str
    peak: float
    floor: float
    warmup: int
    end: int
    cooldown: int = 0
    """wsd: the last steps before `end`, in which it decays."""
    shape: str = "linear"
    """wsd: the decay's shape."""
    start: float = 0.0
    """Rate that the warmup begins from: 0, or that of the phase before."""

    def lr(self, step: float) -> float:
        """Learning rate of the update of `step` (1-based: the first update already moves)."""
        if step < self.warmup:
            return self.start + (self.peak - self.start) * step / self.warmup
        if self.kind == "constant":
            return self.peak
        if self.kind == "inverse-sqrt":
            first = max(1, self.warmup)
            return max(self.floor, self.peak * math.sqrt(first / max(first, min(step, self.end))))
        begin, shape = self.warmup, self.kind
        if self.kind == "wsd":
            begin, shape = max(self.warmup, self.end - self.cooldown), self.shape
        progress = min(1.0, max(0.0, step - begin) / max(1, self.end - begin))
        return self.floor + (self.peak - self.floor) * SHAPES[shape](progress)


def schedule(settings: OptimSettings, steps: int, width: int, tuned: bool = False) -> Schedule:
    """The schedule of a run (or of one phase of it) of so many steps.

    Args:
        settings: where lr is absent, the peak is 6e-4 at width 768, by the square root of the width (2.6e-4 at 4,096,
            1.8e-4 at 8,192: GPT-2's and LLaMA's rates to a quarter). Lion's update is a sign, larger than Adam's, and
            wants 3 to 10 times less (Chen et al. 2023, arXiv:2302.06675, section 5): a fifth.
        steps: all of them.
        width: of the model.
        tuned: the model has learned already and all of it is trained: a tenth of the rate. (An adapter of it starts
            from nothing and wants about ten times more than its model would.)

    Raises:
        UserError: a warmup, as a share of the steps, that outlasts the decay.
    """
    rule = 6e-4 * math.sqrt(768 / width) * (0.2 if settings.kind == "lion" else 1.0) * (0.1 if tuned else 1.0)
    peak = settings.lr or rule
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else round(settings.warmup)
    if settings.decay_steps and warmup >= settings.decay_steps:
        raise UserError(
            f"optim: found decay_steps = {settings.decay_steps} and a warmup of {warmup} steps, expected the floor to "
            "be reached after the warmup; raise decay_steps or lower warmup"
        )
    end = max(2, settings.decay_steps or steps)  # the one step of a shortest run is not at the floor, which may be 0
    cooldown = settings.cooldown or 0.0
    return Schedule(
        kind=settings.schedule,
        peak=peak,
        floor=peak * (settings.min_ratio or 0.0),
        warmup=warmup,
        end=end,
        cooldown=max(1, round(cooldown * end if cooldown < 1 else cooldown)),
        shape=settings.cooldown_shape or "linear",
    )
