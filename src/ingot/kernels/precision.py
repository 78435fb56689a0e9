"""What matrices are multiplied in."""

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast multiplies in on that device; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def rounded(x: Tensor) -> Tensor:
    """What several matrices read, in what they multiply in: each would make, and keep, a copy of its own."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)
