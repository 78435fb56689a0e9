"""Training's own functions in C++ (`cpp/`): whether they are here, and how to call one.

There is a library of them for each kind of numbers that are multiplied. In bf16 it is for CPUs with such instructions,
and by matrix tiles where there are any; in fp32 it is for vectors of 8 floats and more, and by tiles where that pays.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.kernels.build import build, multiplies_bf16, word

_SOURCE = Path(__file__).parent / "cpp" / "train" / "native.cpp"
_POINTERS = {"forward_block": 4, "backward_block": 5}
"""How many arguments a function has that takes more than a list of words."""


def available(dtype: torch.dtype, say: Callable[[str], None] | None = None) -> bool:
    """Whether this CPU has functions that multiply such numbers; the first call builds them."""
    return _vectors(dtype) and _library(dtype, say) is not None


def call(dtype: torch.dtype, name: str, *arguments: Tensor | float | None) -> None:
    """A function that takes a list of words."""
    function(dtype, name)(words(*arguments))


def words(*arguments: Tensor | float | None) -> ctypes.Array[Any]:
    """Arguments one after another, as the functions read them."""
    return (ctypes.c_int64 * len(arguments))(*map(word, arguments))


@cache
def function(dtype: torch.dtype, name: str) -> Callable[..., None]:
    """By its name."""
    found = getattr(_library(dtype), name)
    found.argtypes, found.restype = [ctypes.c_void_p] * _POINTERS.get(name, 1), None
    return found


def _vectors(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32 and torch.cpu._is_avx2_supported()


_NUMBERS = {torch.bfloat16: "bf16", torch.float32: "float"}
_built: dict[torch.dtype, ctypes.CDLL | None] = {}


def _library(dtype: torch.dtype, say: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The functions; None where they cannot be built."""
    if dtype not in _built:
        library = build(_SOURCE, say, (f"-DNUMBER={_NUMBERS[dtype]}",))
        usable = library is not None and (dtype != torch.bfloat16 or multiplies_bf16(library))
        _built[dtype] = library if usable else None
    return _built[dtype]
