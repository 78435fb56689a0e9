"""Activation checkpointing: the backward pass computes activations again instead of reading them from memory.

Blocks are run in segments, and a segment stores only its input, the residual stream (Chen et al. 2016,
arXiv:1604.06174). Segments of one block (`full`) store L inputs and, during the backward pass, the activations of one
block; segments of sqrt(L) blocks (`sqrt`) store about sqrt(L) of both. Either way every block is computed once more, a
third of the work of a step. `selective` stores the results of matrix products and fused attention beside the inputs
and computes the rest again, which is cheap (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

The gradients are those without checkpointing, to the bit: the same kernels read the same numbers, and dropout draws
the same masks, because a segment restores the state of the random numbers it began with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_PRODUCTS = ("mm", "addmm")
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


def checkpointed(run: Callable[..., Any], model: nn.Module, selective: bool) -> Callable[..., Any]:
    """`run` with its activations computed again in the backward pass; `run` itself if there will be none.

    Args:
        run: a function of tensors that computes a segment of the model's blocks.
        selective: whether the results of matrix products and fused attention are stored.
    """
    if not torch.is_grad_enabled():
        return run
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    random = model.training and any(getattr(module, "dropout", 0.0) for module in model.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if selective:  # attention whose result is stored would not draw its random numbers again
        stored = _operations(_PRODUCTS) + ([] if random else _operations(_ATTENTION, "_scaled_dot_product_"))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, stored)
    return partial(checkpoint, run, **options)


def _operations(names: tuple[str, ...], prefix: str = "") -> list[Any]:
    return [getattr(torch.ops.aten, prefix + name).default for name in names]
