"""Kernels of a GPU (`kernels.py`) as operators, so that a compiler calls them and does not look inside."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None
"""Whether a GPU has kernels of our own: what they are written in comes with torch for Linux."""
SHORT = (torch.bfloat16, torch.float16)
"""What they are for: numbers of 16 bits."""

_library = torch.library.Library("ingot", "FRAGMENT")


def operator(schema: str, shapes: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
    """`torch.ops.ingot.NAME`: on a GPU the function of that name in `kernels.py`, which is imported when it is called.

    Args:
        shapes: tensors without values, as it would return them.
    """
    name = schema.partition("(")[0]

    def kernel(*args: Any) -> Any:
        return getattr(import_module("ingot.kernels.triton"), name)(*args)

    _library.define(schema)
    _library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"ingot::{name}", shapes, lib=_library)
