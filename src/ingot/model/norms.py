"""RMSNorm and LayerNorm: before attention and feed-forward, after the last block, optionally on queries and keys.

Both compute in the dtype of their weight: fp32 even when autocast made the input bf16. torch's own modules initialise
themselves; models here are built on the meta device and initialised by `transformer.build`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """(x - mean) / std * weight + bias (Ba et al. 2016, arXiv:1607.06450); the bias is optional."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """The model's kind of norm, over `size` features."""
    if config.norm == "rms":
        return RMSNorm(size, config.norm_eps)
    return LayerNorm(size, config.norm_eps, bias=config.bias == "all")
