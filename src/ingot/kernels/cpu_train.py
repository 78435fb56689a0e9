"""Kernels of training on a CPU, in C++ (`cpp/train/`): availability and calls.

There is one library per dtype of matrix products: bf16 for CPUs with AVX512-BF16, fp32 for CPUs with AVX2.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ingot.kernels.build import build, has_fast_bf16, pack_arguments

_SOURCE = Path(__file__).parent / "cpp" / "train" / "native.cpp"
_POINTERS = {"forward_block": 4, "backward_block": 5}
"""Number of pointer arguments; kernels that are not listed take one array of packed arguments."""
_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
_built: dict[torch.dtype, ctypes.CDLL | None] = {}


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU has the vector instructions of the kernels for matrix products in `dtype`."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32 and torch.cpu._is_avx2_supported()


def available(dtype: torch.dtype, notify: Callable[[str], None] | None = None) -> bool:
    """Whether there are kernels for matrix products in `dtype` on this machine. The first call builds them.

    Args:
        notify: receives a message when kernels are built, which takes seconds, or cannot be built.
    """
    return has_instructions(dtype) and _library(dtype, notify) is not None


def call(dtype: torch.dtype, name: str, *arguments: Tensor | float | None) -> None:
    """Call a kernel that takes one array of packed arguments."""
    function(dtype, name)(pack_arguments(*arguments))


@cache
def function(dtype: torch.dtype, name: str) -> Callable[..., None]:
    """A kernel by name."""
    kernel = getattr(_library(dtype), name)
    kernel.argtypes, kernel.restype = [ctypes.c_void_p] * _POINTERS.get(name, 1), None
    return kernel


def _library(dtype: torch.dtype, notify: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The library; None if it cannot be built."""
    if dtype not in _built:
        library = build(_SOURCE, notify, (f"-DNUMBER={_NAMES[dtype]}",))
        usable = library is not None and (dtype != torch.bfloat16 or has_fast_bf16(library))
        _built[dtype] = library if usable else None
    return _built[dtype]
