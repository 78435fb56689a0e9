"""Kernels of training on a CPU, in C++ (`cpp/train/`): whether they exist, and how to call one.

There is one library for each dtype of matrix products: bf16 on CPUs with such instructions, fp32 on CPUs with vectors
of 8 floats and more.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ingot.kernels.build import build, multiplies_bf16, words

_SOURCE = Path(__file__).parent / "cpp" / "train" / "native.cpp"
_POINTERS = {"forward_block": 4, "backward_block": 5}
"""Number of arguments of functions that take more than a list of words."""
_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
_built: dict[torch.dtype, ctypes.CDLL | None] = {}


def has_vectors(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions that the kernels for products in `dtype` need."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32 and torch.cpu._is_avx2_supported()


def available(dtype: torch.dtype, notify: Callable[[str], None] | None = None) -> bool:
    """Whether there are kernels for products in `dtype` here; the first call builds them.

    Args:
        notify: receives a message when they are built, which takes some seconds, or cannot be.
    """
    return has_vectors(dtype) and _library(dtype, notify) is not None


def call(dtype: torch.dtype, name: str, *arguments: Tensor | float | None) -> None:
    """Call a kernel that takes a list of words."""
    function(dtype, name)(words(*arguments))


@cache
def function(dtype: torch.dtype, name: str) -> Callable[..., None]:
    """A kernel by its name."""
    found = getattr(_library(dtype), name)
    found.argtypes, found.restype = [ctypes.c_void_p] * _POINTERS.get(name, 1), None
    return found


def _library(dtype: torch.dtype, notify: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The kernels; None where they cannot be built."""
    if dtype not in _built:
        library = build(_SOURCE, notify, (f"-DNUMBER={_NAMES[dtype]}",))
        usable = library is not None and (dtype != torch.bfloat16 or multiplies_bf16(library))
        _built[dtype] = library if usable else None
    return _built[dtype]
