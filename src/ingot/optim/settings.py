"""Settings of the optimizer and its schedule."""

from typing import Literal

from pydantic import Field

from ingot.core.recipe import Settings


class OptimSettings(Settings):
    """AdamW with a learning-rate schedule and gradient clipping."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; default 6e-4 * sqrt(768 / width), a tenth of that where the stage has an `init`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled: a step multiplies decayed weights by 1 - lr * weight_decay."""
    decay_embeddings: bool = True
    """Whether embedding tables decay too (they have two dimensions, so by the rule dim >= 2 they do)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warmup."""
    warmup: float = Field(default=0.02, ge=0)
    """Steps of linear warmup; below 1 it is a share of all steps."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Floor of the schedule as a share of the peak."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Step at which the floor is reached; default: the last."""
