"""Training's own functions in C++ (`cpp/`) for CPUs with bf16 instructions: whether they are here, and how to call one.

Matrix tiles are four times as fast as such instructions, and oneDNN's.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.model.library import build, word

_SOURCE = Path(__file__).parent / "cpp" / "native.cpp"
_POINTERS = {"forward_block": 4, "backward_block": 6}
"""How many arguments a function has that takes more than a list of words."""


def here(say: Callable[[str], None] | None = None) -> bool:
    """Whether the CPU multiplies bf16 in vectors and has no matrix tiles; the first call builds the functions."""
    wanted = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return wanted and _library(say) is not None


def call(name: str, *arguments: Tensor | float | None) -> None:
    """A function that takes a list of words."""
    function(name)(words(*arguments))


def words(*arguments: Tensor | float | None) -> ctypes.Array[Any]:
    """Arguments one after another, as the functions read them."""
    return (ctypes.c_int64 * len(arguments))(*map(word, arguments))


@cache
def function(name: str) -> Callable[..., None]:
    """By its name."""
    found = getattr(_library(), name)
    found.argtypes, found.restype = [ctypes.c_void_p] * _POINTERS.get(name, 1), None
    return found


_built: list[ctypes.CDLL | None] = []


def _library(say: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The functions; None where they cannot be built."""
    if not _built:
        _built.append(build(_SOURCE, say))
    return _built[0]
