"""The dtypes of autocast and of reductions."""

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast multiplies matrices on a device; None where autocast is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def to_autocast(x: Tensor) -> Tensor:
    """`x` in autocast's dtype, so that several layers share one cast; autocast itself would cast once per layer."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
