"""The learning rate as a pure function of the 1-based step.

Linear warmup to the peak, then one of the kinds below. The schedule is continuous, and constant after its end. The
first update has a learning rate above 0, because steps count from 1.

* cosine: Loshchilov and Hutter 2017 (SGDR), eq. 5, without restarts. Progress is (t - W) / (D - W): it is counted from
  the end of the warmup, because t / T would make the rate jump there.
* linear: from the peak to the floor, with the same progress.
* wsd: warmup, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395); the decay shape `sqrt`, 1 - sqrt(progress),
  was best in Hagele et al. 2024 (arXiv:2405.18392).
* inverse-sqrt: peak * sqrt(W / t) (Vaswani et al. 2017, eq. 3), not below the floor.
* constant: the peak.

t step, W warmup steps, D step at which the floor is reached, T steps of the run.
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
"""Decay shapes: progress from 0 to 1 to the remaining fraction of (peak - floor), from 1 to 0."""


@dataclass(frozen=True)
class Schedule:
    """Linear warmup over `warmup` steps to `peak`, then `kind` down to `floor` at step `end`, then the floor."""

    kind: str
    peak: float
    floor: float
    warmup: int
    end: int
    cooldown: int = 0
    """wsd: number of steps of the decay, which ends at `end`."""
    shape: str = "linear"
    """wsd: shape of the decay."""
    start: float = 0.0
    """Learning rate at the start of the warmup: 0, or the last one of the previous phase."""

    def lr(self, step: float) -> float:
        """Learning rate of a step, counted from 1."""
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


def schedule(settings: OptimSettings, steps: int, width: int, finetune: bool = False) -> Schedule:
    """The schedule of a run, or of one phase of it.

    Without `settings.lr` the peak is 6e-4 * sqrt(768 / width), which is within a quarter of GPT-2's and LLaMA's rates.
    Lion gets a fifth of it: its updates are signs, larger than Adam's, and need a 3 to 10 times lower rate (Chen et al.
    2023, arXiv:2302.06675, section 5).

    Args:
        steps: number of steps.
        width: of the model.
        finetune: whether all weights of a pretrained model are trained, which takes a tenth of the rate. (An adapter
            needs about ten times the rate of its model, so it gets the full rate.)

    Raises:
        UserError: the warmup ends after `decay_steps`.
    """
    default = 6e-4 * math.sqrt(768 / width) * (0.2 if settings.kind == "lion" else 1.0) * (0.1 if finetune else 1.0)
    peak = settings.lr or default
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else round(settings.warmup)
    if settings.decay_steps and warmup >= settings.decay_steps:
        raise UserError(
            f"optim: found decay_steps = {settings.decay_steps} and a warmup of {warmup} steps, expected the floor to "
            "be reached after the warmup; raise decay_steps or lower warmup"
        )
    end = max(2, settings.decay_steps or steps)  # a run of one step must not be at the floor, which may be 0
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
