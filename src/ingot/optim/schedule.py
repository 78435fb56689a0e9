"""The learning rate as a pure function of the 1-based step.

Loshchilov and Hutter 2017 (SGDR), eq. 5, without restarts and counted from the end of the warmup: the cosine starts
where the warmup stops, so the curve has no jump at the joint, and past its end it stays at the floor. (With t / T in
place of (t - W) / (D - W) it drops from 3e-4 to 2.929e-4 at the joint for W = 1k, T = 10k.)
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warmup over `warmup` steps to `peak`, then `kind` down to `floor` at step `end`, then the floor."""

    kind: str
    peak: float
    floor: float
    warmup: int
    end: int

    def lr(self, step: float) -> float:
        """Learning rate of the update of `step` (1-based: the first update already moves)."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / max(1, self.end - self.warmup))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.floor + (self.peak - self.floor) * left
