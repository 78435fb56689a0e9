"""Building the C++ kernels: once, by the machine's compiler, in a few seconds; kept under a digest of all they are.

A library is one source file, which includes headers beside it and those of `cpp/common/`.
"""

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.core import artifact

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMMON = Path(__file__).parent / "cpp" / "common"
_TIMEOUT_S = 600


def build(
    source: Path, notify: Callable[[str], None] | None = None, macros: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    """The library of a source file, built if it is not on disk; None without a compiler or a place to keep it.

    Args:
        notify: receives a message when it is built, or why it cannot be.
        macros: distinguish several libraries of one source.
    """
    flags = (*FLAGS, *macros)
    compiler = os.environ.get("CXX") or "g++"
    identity = (compiler, _version(compiler), flags, platform.machine(), sorted(torch.cpu.get_capabilities().items()))
    try:
        files = [source, *sorted(source.parent.glob("[a-z]*.h")), *sorted(_COMMON.glob("[a-z]*.h"))]
        name = artifact.digest_bytes(repr(identity).encode() + b"".join(file.read_bytes() for file in files))
        path = artifact.cache() / "native" / f"{name}.so"
        if not _is_intact(path):
            if notify is not None:
                notify("building C++ kernels for this CPU, once; this takes some seconds")
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as scratch:
                built = Path(scratch, "built.so")
                command = [*compiler.split(), *flags, f"-I{_COMMON}", str(source), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
                data = built.read_bytes()
            artifact.atomic_write(path, data + _checksum(data))
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        if notify is not None:
            notify(f"{compiler} could not build the C++ kernels ({_reason(error)}); PyTorch computes, which is slower")
        return None


def multiplies_bf16(library: ctypes.CDLL) -> bool:
    """Whether the library's bf16 products are the CPU's fastest: a compiler may not know the CPU's matrix tiles."""
    return bool(library.tiles()) or not torch.cpu._is_amx_tile_supported()


def words(*arguments: Tensor | float | None) -> ctypes.Array[Any]:
    """Arguments as the kernels read them: addresses of tensors, numbers, 0 for None, one after another."""
    return (ctypes.c_int64 * len(arguments))(*map(_word, arguments))


def _word(argument: Tensor | float | None) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return _bits(argument) if isinstance(argument, float) else argument or 0


@cache
def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """The compiler's first error, or what kept it from running."""
    output = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in output.splitlines() if "error:" in line), type(error).__name__)


def _version(compiler: str) -> tuple[int, int] | None:
    """Size and time of the compiler's file, which change with its version."""
    path = shutil.which(compiler.split()[0])
    stat = None if path is None else os.stat(path)
    return stat and (stat.st_size, stat.st_mtime_ns)


def _is_intact(path: Path) -> bool:
    """Whether a library is on disk as it was written: a damaged one would end the process that loads it."""
    if not path.exists():
        return False
    data = path.read_bytes()
    size = len(_checksum(b""))
    return data[-size:] == _checksum(data[:-size])


def _checksum(data: bytes) -> bytes:
    """Written behind a library, where no loader looks."""
    return artifact.digest_bytes(data).encode()
