"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

The smallest positive fp16 number is 6e-8, and gradients of a mean over many tokens underflow. So the loss is multiplied
by a power of two before the backward pass, and gradients are divided by it before clipping; both are exact. An update
whose gradient overflows is skipped and halves the scale; `GROWTH_STEPS` updates without overflow double it. bf16 has
the range of fp32 and needs no scaling.

torch's GradScaler is not used: its state lives on the device and it decides inside `step`, but the log, the health
rules and checkpoints need both. Here the state is two numbers.
"""

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Updates without overflow after which the scale doubles. Both constants are torch's defaults."""


def adjust(scale: float, steps: int, finite: bool) -> tuple[float, int]:
    """The new scale, and the number of updates without overflow since it last changed."""
    if not finite:
        return scale / 2, 0
    if steps + 1 == GROWTH_STEPS:
        return scale * 2, 0
    return scale, steps + 1
