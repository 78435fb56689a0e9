"""What several matrix products share: their input, rounded once as autocast would, and on a GPU the product itself."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRITON = find_spec("triton") is not None
"""Whether a GPU has kernels of our own (`kernels.py`): it comes with torch for Linux."""
_SHORT = 1 << 28
"""Multiplications of a product below which the calls of several are felt on a CPU."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast multiplies in on that device; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def rounded(x: Tensor) -> Tensor:
    """What several matrices read, in what they multiply in: each would make, and keep, a copy of its own."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def products(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Every layer's output for the same input.

    On a GPU plain matrices are one product: 768 to three times 768 features runs at 665 to 704 TFLOP/s where each alone
    runs at 449 to 546 (16,384 rows, bf16, H100), and their gradients need not be added up. On a CPU short ones are,
    where they are compiled: 12 rows of 64 tokens of a model 128 wide 14.2 to 12.9 ms a step, 64 rows of them, whose
    gate and up are too long, 51.5 to 51.0 (52 to 57 with those, mostly).
    """
    x = rounded(x)
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    short = torch.compiler.is_compiling() and x.numel() * sum(len(layer.weight) for layer in plain) < _SHORT
    if not (x.is_cuda or short) or len(plain) < len(layers):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight.to(x.dtype) for layer in plain])
    biases = [layer.bias.to(x.dtype) for layer in plain if layer.bias is not None]
    return F.linear(x, weight, torch.cat(biases) if biases else None).split([len(m.weight) for m in plain], dim=-1)
