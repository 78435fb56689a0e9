"""Building the C++ kernels with the machine's compiler, which takes a few seconds.

A library is one source file that includes headers from its own directory and from `cpp/common/`. It is cached under a
digest of the sources, the compiler, its flags and the CPU. A cache that other users can write to is not used.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.core import artifact

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMMON = Path(__file__).parent / "cpp" / "common"
_TIMEOUT_S, _SIGN_S = 600, 8


def build(
    source: Path, notify: Callable[[str], None] | None = None, macros: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    """The library of a source file, from the cache or newly built; None if it cannot be built or stored.

    Args:
        notify: receives a message when the library is built, or the reason why it cannot be.
        macros: additional flags, to build several libraries of one source.
    """
    flags = (*FLAGS, *macros)
    compiler = os.environ.get("CXX") or "g++"
    identity = (compiler, _version(compiler), flags, platform.machine(), sorted(torch.cpu.get_capabilities().items()))
    try:
        files = [source, *sorted(source.parent.glob("[a-z]*.h")), *sorted(_COMMON.glob("[a-z]*.h"))]
        name = artifact.digest_bytes(repr(identity).encode() + b"".join(file.read_bytes() for file in files))
        directory = artifact.code_directory("native")
        path = directory and directory / f"{name}.so"
        if path is not None and _is_intact(path):
            return ctypes.CDLL(str(path))
        if notify is not None:
            notify("building C++ kernels for this CPU, once; this takes some seconds")
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, "kernels.so")
            command = [*compiler.split(), *flags, f"-I{_COMMON}", str(source), "-o", str(output)]
            with _signs_of_life(notify):
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            data = output.read_bytes()
            if path is None:
                if notify is not None:
                    notify(
                        f"{artifact.cache_directory()}: other users can write to this cache, so the kernels are built "
                        "anew each time; take away their permission (chmod -R go-w), or set INGOT_CACHE"
                    )
                return ctypes.CDLL(str(output))  # stays loaded when the file is deleted
        artifact.atomic_write(path, data + _checksum(data))
        path.chmod(0o600)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        if notify is not None:
            notify(f"{compiler} could not build the C++ kernels ({_reason(error)}); using PyTorch, which is slower")
        return None


@contextlib.contextmanager
def _signs_of_life(notify: Callable[[str], None] | None) -> Iterator[None]:
    """Context in which a message every few seconds says that the compiler still runs."""
    done, start = threading.Event(), time.monotonic()

    def say() -> None:
        while notify is not None and not done.wait(_SIGN_S):
            notify(f"still building C++ kernels after {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def has_fast_bf16(library: ctypes.CDLL) -> bool:
    """Whether the library's bf16 products are the CPU's fastest: a compiler may lack support for matrix tiles."""
    return bool(library.amx_enabled()) or not torch.cpu._is_amx_tile_supported()


def pack_arguments(*arguments: Tensor | float | None) -> ctypes.Array[Any]:
    """The arguments of a kernel as 64-bit words: addresses of tensors, numbers, 0 for None."""
    return (ctypes.c_int64 * len(arguments))(*map(_word, arguments))


def _word(argument: Tensor | float | None) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return _float_bits(argument) if isinstance(argument, float) else argument or 0


@cache
def _float_bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<fi", number, 0))[0]


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """The compiler's first error message, or the exception's name if it did not run."""
    output = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in output.splitlines() if "error:" in line), type(error).__name__)


def _version(compiler: str) -> tuple[int, int] | None:
    """Size and modification time of the compiler's executable, which identify its version."""
    path = shutil.which(compiler.split()[0])
    stat = None if path is None else os.stat(path)
    return stat and (stat.st_size, stat.st_mtime_ns)


def _is_intact(path: Path) -> bool:
    """Whether a library exists, belongs to this user, and matches its checksum: a damaged one crashes the process."""
    if not path.is_file() or not artifact.is_private(path):
        return False
    data = path.read_bytes()
    size = len(_checksum(b""))
    return data[-size:] == _checksum(data[:-size])


def _checksum(data: bytes) -> bytes:
    """The checksum that is appended to a library; the loader ignores it."""
    return artifact.digest_bytes(data).encode()
