"""The two kinds of feed-forward: SwiGLU with three matrices, GELU with two. Parameters are named as in Llama.

Shapes: B rows, T positions, W width, F inner features.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.config import ModelConfig
from ingot.model.linear import fused_linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.bias == "all"
        self.gate = nn.Linear(config.width, config.ffn, bias=bias)
        self.up = nn.Linear(config.width, config.ffn, bias=bias)
        self.down = nn.Linear(config.ffn, config.width, bias=bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        gate_BTF, up_BTF = fused_linear(x_BTW, (self.gate, self.up))
        return self.down(F.silu(gate_BTF) * up_BTF)


class GELU(nn.Module):
    """down(gelu(up(x))) (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact or with GPT-2's tanh approximation."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.bias == "all"
        self.approximate = "tanh" if config.activation == "gelu-tanh" else "none"
        self.up = nn.Linear(config.width, config.ffn, bias=bias)
        self.down = nn.Linear(config.ffn, config.width, bias=bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTW), approximate=self.approximate))


def make_feedforward(config: ModelConfig) -> SwiGLU | GELU:
    """The model's kind of feed-forward."""
    return SwiGLU(config) if config.activation == "swiglu" else GELU(config)
