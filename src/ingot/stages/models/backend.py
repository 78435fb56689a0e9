"""Selects the backend of a model; PyTorch is used where the package `ingot.backends` was removed."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ingot.model.backend import TORCH, Backend


def backend_for(model: nn.Module, device: str, dtype: torch.dtype, **options: Any) -> Backend:
    """The backend that `backends.select.select` chooses for these arguments, or the PyTorch reference."""
    if find_spec("ingot.backends") is None:
        return TORCH
    from ingot.backends.select import select

    return select(model, device, dtype, **options)
