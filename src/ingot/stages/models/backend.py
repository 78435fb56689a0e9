"""The backend of a model, if the package `backends` is there: without it PyTorch computes everything."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ingot.model.backend import TORCH, Backend


def backend_for(model: nn.Module, device: str, dtype: torch.dtype, **options: Any) -> Backend:
    """`backends.select.select`, or the reference where that package was removed."""
    if find_spec("ingot.backends") is None:
        return TORCH
    from ingot.backends.select import select

    return select(model, device, dtype, **options)
