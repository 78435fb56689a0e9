"""C++ of ours, built once by the machine's own compiler in a few seconds and kept under a digest of all it depends on.

A library is one file, which includes headers beside it and those of `cpp/` here: vectors, matrix products, how a
function is called. Decoding has one (`infer/cpp`), training another (`train/cpp`).
"""

import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ingot.core import artifact

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_SHARED = Path(__file__).parent / "cpp" / "common"
_PATIENCE = 120
"""Seconds that the compiler may take."""


def build(source: Path, say: Callable[[str], None] | None = None, macros: tuple[str, ...] = ()) -> CDLL | None:
    """The functions, built if they are not on disk, which `say` is told.

    None without a compiler or a place for what it makes.

    Args:
        macros: with which one source makes several libraries.
    """
    flags = (*FLAGS, *macros)
    compiler = os.environ.get("CXX") or "g++"
    about = (compiler, _version(compiler), flags, platform.machine(), sorted(torch.cpu.get_capabilities().items()))
    try:
        parts = [source, *sorted(source.parent.glob("[a-z]*.h")), *sorted(_SHARED.glob("[a-z]*.h"))]
        name = artifact.digest_bytes(repr(about).encode() + b"".join(part.read_bytes() for part in parts))
        path = artifact.cache() / "native" / f"{name}.so"
        if not _whole(path):
            if say is not None:
                say("building our functions for this CPU, once; that takes some seconds")
            path.parent.mkdir(parents=True, exist_ok=True)  # where that is not possible there is nothing to build for
            with tempfile.TemporaryDirectory() as scratch:
                made = Path(scratch, "made.so")
                command = [*compiler.split(), *flags, f"-I{_SHARED}", str(source), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
                data = made.read_bytes()
            artifact.atomic_write(path, data + _end(data))
        return CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        if say is not None:
            say(f"{compiler} could not build them ({_why(error)}); torch computes, which is slower")
        return None


def _why(error: OSError | subprocess.SubprocessError) -> str:
    """The compiler's first complaint, or what kept it from making one."""
    told = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in told.splitlines() if "error" in line), type(error).__name__)


def _version(compiler: str) -> tuple[int, int] | None:
    """What changes with the compiler, which a newer one may know more of."""
    path = shutil.which(compiler.split()[0])
    about = None if path is None else os.stat(path)
    return about and (about.st_size, about.st_mtime_ns)


def multiplies_bf16(library: CDLL) -> bool:
    """Whether its products in bf16 are the CPU's fastest: the compiler and the system may know nothing of its tiles."""
    return bool(library.tiles()) or not torch.cpu._is_amx_tile_supported()


def _whole(path: Path) -> bool:
    """Whether a library is there as it was written: a damaged one ends the process that loads it."""
    if not path.exists():
        return False
    data = path.read_bytes()
    size = len(_end(b""))
    return data[-size:] == _end(data[:-size])


def _end(data: bytes) -> bytes:
    """What is written behind a library, where no loader looks."""
    return artifact.digest_bytes(data).encode()


def word(argument: Tensor | float | None) -> int:
    """An argument as the functions take it: where a tensor's numbers are, a number, 0 for None."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return _bits(argument) if isinstance(argument, float) else argument or 0


@cache
def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]
