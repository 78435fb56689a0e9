"""Rotary position embeddings: each pair of features of a query or key is rotated by an angle proportional to position.

The dot product of a rotated query and key depends only on the difference of their positions, so documents packed into
one row need no positions of their own. Angles are computed in each forward pass, which costs less than one matrix
product; a cached table would be a buffer to keep consistent with context, device and dtype.

Shapes: B rows, T positions, H heads, D features of a head, E = D / 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.model.config import RopeScaling


class Rope(NamedTuple):
    """Cosines and sines of the positions of one forward pass, fp32 or better, shared by all blocks."""

    cos_BT1E: Tensor
    """(B or 1) x T x 1 x E."""
    sin_BT1E: Tensor
    """(B or 1) x T x 1 x E."""


def make_rope(
    positions_BT: Tensor, head_size: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rope:
    """Angles position * theta^(-2 i / D) (Su et al. 2021, arXiv:2104.09864), in `dtype` but at least fp32.

    bf16 cannot represent positions above 256 exactly: it has 8 bits of mantissa.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent_E = torch.arange(0, head_size, 2, dtype=dtype, device=positions_BT.device) / head_size
    frequency_E = theta**-exponent_E
    if scaling is not None:
        frequency_E = scale_frequencies(frequency_E, scaling)
    angle_BTE = positions_BT.to(dtype)[..., None] * frequency_E
    return Rope(angle_BTE.cos()[:, :, None], angle_BTE.sin()[:, :, None])


def scale_frequencies(frequency_E: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for a longer context as in Llama 3.1 (arXiv:2407.21783; the rule is in its released code).

    High frequencies, which separate neighbouring tokens, stay. Low ones, which would reach angles never seen in
    training, are divided by the factor. Those in between are interpolated.
    """
    rotations_E = scaling.original_context * frequency_E / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    weight_E = ((rotations_E - low) / (high - low)).clamp(0, 1)
    return weight_E * frequency_E + (1 - weight_E) * frequency_E / scaling.factor


def apply_rope(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Rotate feature pairs (i, i + D/2): Hugging Face's layout for Llama, so its weights load without a permutation."""
    a_BTHE, b_BTHE = x_BTHD.chunk(2, dim=-1)
    cos, sin = rope
    rotated = (a_BTHE * cos - b_BTHE * sin, b_BTHE * cos + a_BTHE * sin)
    return torch.cat([half.to(x_BTHD.dtype) for half in rotated], dim=-1)
