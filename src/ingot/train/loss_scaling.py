"""Loss scaling, with which fp16 can hold gradients (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

The smallest positive fp16 number is 6e-8, and gradients of a mean over many tokens fall below it. The loss is
multiplied by a power of two before the backward pass and gradients are divided by it after (both exact), before the
norm is taken and clipped. A gradient that overflowed is not applied and halves the scale; many good updates double it.

Two numbers in the checkpoint replace torch's GradScaler, whose state is tensors on a device and which decides inside
`step` what the log, the health rules and a resumed run need to know. bf16 has the range of fp32 and needs none of this.
"""

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Updates without an overflow before the scale is doubled. Both are torch's defaults."""


def adjust(scale: float, steps: int, finite: bool) -> tuple[float, int]:
    """The scale and the number of good updates since it last changed, after an update."""
    if not finite:
        return scale / 2, 0
    if steps + 1 == GROWTH_STEPS:
        return scale * 2, 0
    return scale, steps + 1
