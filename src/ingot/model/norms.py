"""RMSNorm and LayerNorm, before every attention and feed-forward, after the last, and of queries and keys where asked.

Both compute in the precision of their weight, which is float32 also where autocast has made the input bfloat16.

Rejected: torch's own modules. Their gains and biases are right, but `nn.LayerNorm` initialises itself, and a model here
is made without values on the meta device and filled in one place (`Transformer.init_weights`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.kernels.operators import SHORT, TRITON, operator
from ingot.kernels.precision import autocast_dtype
from ingot.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias (Ba et al. 2016, arXiv:1607.06450), the bias as an option."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """The norm of that model over `size` features."""
    if config.norm == "rms":
        return RMSNorm(size, config.norm_eps)
    return LayerNorm(size, config.norm_eps, bias=config.bias == "all")


def branch(norm: RMSNorm | LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """The stream, and norm(x), which a branch of it reads.

    On a GPU one kernel makes the stream's gradient from those of both, and on the way a few sums for those of gain and
    bias, and the branch gets what its matrices multiply in. torch's compiler has a kernel of that kind too, but leaves
    1,024 sums to be added up by a slow one (GPT-2's 124M, 16 rows of 1,024 on an H200: 31.79 to 31.45 ms a step).
    """
    if not _has_kernel(norm, x):
        return x, norm(x)
    return _Branch.apply(x, norm.eps, isinstance(norm, LayerNorm), *norm.parameters())  # type: ignore[no-any-return]


def _has_kernel(norm: RMSNorm | LayerNorm, x: Tensor) -> bool:
    short = x.dtype in SHORT and x.dtype == autocast_dtype(x.device) and norm.weight.dtype == torch.float32
    return TRITON and x.is_cuda and short and x.shape[-1] <= WIDEST


class _Branch(torch.autograd.Function):
    """The stream and its norm; what the backward pass reads of the forward one is the stream alone."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, eps: float, centred: bool, gain_W: Tensor, *bias_W: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gain_W)
        ctx.how = eps, centred, 1 + len(bias_W)
        wide, size = x.to(gain_W.dtype), gain_W.shape
        normed = F.layer_norm(wide, size, gain_W, *bias_W, eps=eps) if centred else F.rms_norm(wide, size, gain_W, eps)
        return x.view_as(x), normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_stream: Tensor, of_branch: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain_W = ctx.saved_tensors
        of_x, parts_PGW = torch.ops.ingot.norm_backward(of_stream, of_branch, x, gain_W, *ctx.how)
        return of_x, None, None, *parts_PGW.sum(0).unbind()


PART = 32
"""Rows of a gradient whose sums for gain and bias are one part."""
WIDEST = 2048
"""Features of the widest rows that were measured, of which a program holds six in 49 KB of shared memory."""


def _gradients(
    of_stream: Tensor, of_branch: Tensor, x: Tensor, gain_W: Tensor, eps: float, centred: bool, gains: int
) -> tuple[Tensor, Tensor]:
    parts = -(-x.numel() // len(gain_W) // PART)
    return x.new_empty(x.shape), x.new_empty(parts, gains, len(gain_W), dtype=torch.float32)


operator(
    "norm_backward(Tensor of_stream, Tensor of_branch, Tensor x, Tensor gain, float eps, bool centred, int gains)"
    " -> (Tensor, Tensor)",
    _gradients,
)
