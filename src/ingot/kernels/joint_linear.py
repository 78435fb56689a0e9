"""Several matrices times the same input: on a GPU as one product, whose gradient is one matrix too.

Gradients of queries, keys and values come apart. One kernel puts them side by side and adds them up for the bias, which
torch's compiler does in two, the second of which reads all of it once more (GPT-2's 124M, 16 rows of 1,024 on an H200:
31.45 to 31.25 ms a step).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.kernels.operators import SHORT, TRITON, operator
from ingot.kernels.precision import rounded

_SMALL = 1 << 28
"""Multiplications of a product below which the calls of several are felt on a CPU."""
PART = 32
"""Rows of a gradient whose sum for the bias is one part."""
TILE = 128
"""Features that are put in their place at a time; where a kernel does it, every matrix has a multiple of it."""


def products(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Every layer's output for the same input.

    On a GPU plain matrices are one product: 768 to three times 768 features runs at 665 to 704 TFLOP/s where each alone
    runs at 449 to 546 (16,384 rows, bf16, H100), and their gradients need not be added up. On a CPU short ones are,
    where they are compiled: 12 rows of 64 tokens of a model 128 wide 14.2 to 12.9 ms a step, 64 rows of them, whose
    gate and up are too long, 51.5 to 51.0 (52 to 57 with those, mostly).
    """
    x = rounded(x)
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    short = torch.compiler.is_compiling() and x.numel() * sum(len(layer.weight) for layer in plain) < _SMALL
    if not (x.is_cuda or short) or len(plain) < len(layers):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight.to(x.dtype) for layer in plain])
    biases = [layer.bias.to(x.dtype) for layer in plain if layer.bias is not None]
    bias, sizes = torch.cat(biases) if biases else None, [len(layer.weight) for layer in plain]
    fits = len(layers) == 3 and x.dtype in SHORT and not any(size % TILE for size in sizes)
    if TRITON and x.is_cuda and bias is not None and fits:
        return _Joint.apply(x, weight, bias, *sizes)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias).split(sizes, dim=-1)


class _Joint(torch.autograd.Function):
    """Three layers' outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NW: Tensor, bias_N: Tensor, *sizes: int) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight_NW)
        return F.linear(x, weight_NW, bias_N).split(list(sizes), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_NW = ctx.saved_tensors
        joined_nN, parts_PN = torch.ops.ingot.joined(*gradients)
        of_weight = joined_nN.T @ x.reshape(-1, x.shape[-1])
        of_x = (joined_nN @ weight_NW).view(x.shape)
        return of_x, of_weight, parts_PN.sum(0).to(x.dtype), None, None, None


def _gradients(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    rows, features = a.numel() // a.shape[-1], a.shape[-1] + b.shape[-1] + c.shape[-1]
    return a.new_empty(rows, features), a.new_empty(-(-rows // PART), features, dtype=torch.float32)


operator("joined(Tensor a, Tensor b, Tensor c) -> (Tensor, Tensor)", _gradients)
