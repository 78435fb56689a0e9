"""GELU of a linear layer: on a GPU in 16 bits one kernel adds the bias too, and gives its gradient with the other.

torch's own is exact to fp32 in some forty instructions a number, which take longer than memory does (16,384 x 3,072 on
an H200: 77 us, 52 here), and its compiler reads the gradient once more to add it up for the bias (139 us backward, 86
here and the sum of its parts). GPT-2's 124M, 16 rows of 1,024: 32.6 to 31.7 ms a step, and then a better tile.

Rejected: fewer instructions as plain operations of torch, which its compiler fuses; nothing was gained.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.kernels.operators import SHORT, TRITON, operator
from ingot.kernels.precision import autocast_dtype

HERE = TRITON and torch.version.hip is None
"""Whether there is a kernel: it has instructions of NVIDIA's."""


def gelu(layer: nn.Module, x: Tensor, approximate: str) -> Tensor:
    """y P(y) for y = layer(x), with P the normal distribution's probability, "none", or GPT-2's "tanh" for it."""
    if _has_kernel(layer, x):
        return _BiasGELU.apply(F.linear(x, layer.weight), layer.bias, approximate == "tanh")  # type: ignore[no-any-return]
    return F.gelu(layer(x), approximate=approximate)


def _has_kernel(layer: nn.Module, x: Tensor) -> bool:
    plain = type(layer) is nn.Linear and layer.bias is not None
    return HERE and plain and x.is_cuda and (autocast_dtype(x.device) or x.dtype) in SHORT


class _BiasGELU(torch.autograd.Function):
    """GELU of z + bias."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias_N: Tensor, tanh: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(z, bias_N)
        ctx.tanh = tanh
        return torch.ops.ingot.bias_gelu(z, bias_N, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        z, bias_N = ctx.saved_tensors
        of_z, parts_PN = torch.ops.ingot.bias_gelu_backward(gradient, z, bias_N, ctx.tanh)
        return of_z, parts_PN.sum(0).to(bias_N.dtype), None


PART = 64
"""Rows of a gradient whose sum for the bias is one part."""


def _gradients(gradient: Tensor, z: Tensor, bias_N: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    parts = -(-z.numel() // len(bias_N) // PART)
    return z.new_empty(z.shape), z.new_empty(parts, len(bias_N), dtype=torch.float32)


operator("bias_gelu(Tensor z, Tensor bias, bool tanh) -> Tensor", lambda z, bias_N, tanh: z.new_empty(z.shape))
operator("bias_gelu_backward(Tensor gradient, Tensor z, Tensor bias, bool tanh) -> (Tensor, Tensor)", _gradients)
