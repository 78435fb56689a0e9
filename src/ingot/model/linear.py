"""Linear layers that read the same input, such as the query, key and value projections."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.precision import to_autocast


def fused_linear(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The output of every layer for the same input.

    On a GPU the weights are concatenated: one wide matrix product is faster than several narrow ones. Layers with
    adapters or sharded parameters are called one by one.
    """
    x = to_autocast(x)
    plain = [layer for layer in layers if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    if not x.is_cuda or len(plain) < len(layers):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight.to(x.dtype) for layer in plain])
    biases = [layer.bias.to(x.dtype) for layer in plain if layer.bias is not None]
    sizes = [len(layer.weight) for layer in plain]
    return F.linear(x, weight, torch.cat(biases) if biases else None).split(sizes, dim=-1)
