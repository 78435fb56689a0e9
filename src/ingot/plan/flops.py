"""Floating-point operations of a model and a run, from counts alone: no tensor is made, no torch loaded.

Letters: N parameters, D tokens, L layers, d features of all query heads, T context.
"""

from ingot.plan.shape import Shape

FORWARD_FLOPS = 2
"""Per parameter and token: one multiplication, one addition."""
BACKWARD = 2
"""Backward passes cost this many forward ones: gradients of inputs, and of weights."""


def forward_flops(parameters: int, tokens: int) -> int:
    """2 N per token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), attention scores left out."""
    return FORWARD_FLOPS * parameters * tokens


def training_flops(parameters: int, tokens: int) -> int:
    """C = 6 N D: forward, and the backward pass at twice that."""
    return (1 + BACKWARD) * forward_flops(parameters, tokens)


def attention_flops(layers: int, width: int, context: int) -> int:
    """12 L d T per trained token: scores and weighted sum, 2 d T each a forward, three times that with the backward.

    Over the full T x T, as is customary (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), although a causal kernel
    computes half. Where a window limits what is attended to, `context` is the window.
    """
    return (1 + BACKWARD) * 2 * FORWARD_FLOPS * layers * width * context


def multiplied(shape: Shape) -> int:
    """Parameters a token is multiplied with: the head, tied or not, and no table that is looked up."""
    parts = shape.parameters_by_part()
    looked_up = parts["positions"] + (0 if shape.tied else parts["embedding"])
    return sum(parts.values()) - looked_up


def training_flops_per_token(shape: Shape, adapter: int | None = None, whole: int = 0) -> int:
    """6 N + 12 L d T: what utilisation is measured with.

    With an adapter of so many numbers 6 each of those and 4 N, since no gradients are made of what is frozen; of N,
    the `whole` ones that are trained beside it cost 2 each more.
    """
    keys = min(shape.context, shape.window or shape.context)
    attention = attention_flops(shape.depth, shape.heads * shape.head_size, keys)
    if adapter is not None:
        return forward_flops(2 * multiplied(shape) + whole, 1) + training_flops(adapter, 1) + attention
    return training_flops(multiplied(shape), 1) + attention
