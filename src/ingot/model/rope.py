"""Rotary positions: every pair of features of a query or key is turned by an angle that grows with the position.

A product of two turned vectors depends on the difference of their positions only, so documents packed into one row need
no positions of their own. Angles are computed for each forward, not stored: the table would be one more buffer to keep
in step with context, device and precision, and it costs less than one of the matrix products.

Shapes: B rows, T positions, H heads, D features of a head, E = D / 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.model.config import RopeScaling


class Rotation(NamedTuple):
    """Cosines and sines of one forward's positions, at least float32, shared by all layers; (B or 1) x T x 1 x E."""

    cos_BT1E: Tensor
    sin_BT1E: Tensor


def rotation(
    positions_BT: Tensor, head_size: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rotation:
    """Angles position * theta^(-2 i / D) (Su et al. 2021, arXiv:2104.09864), never in less than float32.

    bfloat16 has 8 bits of mantissa: position 257 would not exist.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent_E = torch.arange(0, head_size, 2, dtype=dtype, device=positions_BT.device) / head_size
    frequency_E = theta**-exponent_E
    if scaling is not None:
        frequency_E = stretch(frequency_E, scaling)
    angle_BTE = positions_BT.to(dtype)[..., None] * frequency_E
    return Rotation(angle_BTE.cos()[:, :, None], angle_BTE.sin()[:, :, None])


def stretch(frequency_E: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for a longer context as in Llama 3.1 (arXiv:2407.21783; the rule is in its released code).

    What turns often within the original context tells neighbours apart and is kept; what turns hardly once would meet
    angles it never saw, and is slowed down by the factor; in between the two are mixed in proportion.
    """
    turns_E = scaling.original_context * frequency_E / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_E = ((turns_E - low) / (high - low)).clamp(0, 1)
    return kept_E * frequency_E + (1 - kept_E) * frequency_E / scaling.factor


def rotate(x_BTHD: Tensor, turn: Rotation, by_head: bool = False) -> Tensor:
    """Turn the pairs (i, i + D/2) by their angles: Llama's half-split layout, so its weights load without shuffling.

    Each half is rounded before both are put side by side, where compiled code writes it once and for all.

    Args:
        by_head: in memory a head's tokens lie side by side, as matrix products of single heads read them; else a
            token's heads, in which order a fused kernel's output is as well.
    """
    a_BTHE, b_BTHE = x_BTHD.chunk(2, dim=-1)
    cos, sin = turn
    turned = (a_BTHE * cos - b_BTHE * sin, b_BTHE * cos + a_BTHE * sin)
    halves = [half.to(x_BTHD.dtype) for half in turned]
    if by_head:
        return torch.cat([half.transpose(1, 2) for half in halves], dim=-1).transpose(1, 2)
    return torch.cat(halves, dim=-1)
