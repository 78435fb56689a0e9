"""Floating-point operations of a model and a run, computed from the shape. No torch.

Symbols: N parameters, D tokens, L layers, d features of all query heads, T context.
"""

from ingot.plan.shape import Shape

FORWARD_FLOPS = 2
"""Per parameter and token: one multiplication and one addition."""
BACKWARD = 2
"""Cost of a backward pass in forward passes: gradients of the inputs and of the weights."""


def forward_flops(parameters: int, tokens: int) -> int:
    """2 N per token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), without attention scores."""
    return FORWARD_FLOPS * parameters * tokens


def training_flops(parameters: int, tokens: int) -> int:
    """6 N D: a forward pass and a backward pass of twice its cost."""
    return (1 + BACKWARD) * forward_flops(parameters, tokens)


def attention_flops(layers: int, width: int, context: int) -> int:
    """12 L d T per trained token: 2 d T each for scores and weighted sum, times 3 for forward and backward pass.

    Counts the full T x T matrix, as is customary (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), although a
    causal kernel computes half of it.

    Args:
        context: T, or the attention window if it is smaller.
    """
    return (1 + BACKWARD) * 2 * FORWARD_FLOPS * layers * width * context


def matmul_parameters(shape: Shape) -> int:
    """Parameters that take part in matrix products: includes the head, tied or not, and no embedding lookups."""
    parameters = shape.parameters_by_module()
    looked_up = parameters["positions"] + (0 if shape.tied else parameters["embedding"])
    return sum(parameters.values()) - looked_up


def training_flops_per_token(shape: Shape, adapter: int | None = None, modules_to_save: int = 0) -> int:
    """6 N + 12 L d T, on which MFU is based.

    With an adapter: 6 per adapter parameter and 4 N, because frozen weights have no gradients, and 2 more for each
    parameter of N that is trained in full.

    Args:
        adapter: parameters of the adapters; None: the model is trained in full.
        modules_to_save: parameters that are trained in full next to the adapters.
    """
    keys = min(shape.context, shape.window or shape.context)
    attention = attention_flops(shape.depth, shape.heads * shape.head_size, keys)
    if adapter is not None:
        return forward_flops(2 * matmul_parameters(shape) + modules_to_save, 1) + training_flops(adapter, 1) + attention
    return training_flops(matmul_parameters(shape), 1) + attention
