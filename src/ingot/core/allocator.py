"""Settings of glibc's allocator for tensor workloads: keep freed memory, and back large blocks with 2 MiB pages.

By default glibc maps every large block separately and returns it to the kernel when it is freed, so each allocation
pays for page faults again. Other C libraries ignore these settings.
"""

import contextlib
import ctypes
import os
import platform

_RETAINED_BYTES = 1 << 32
_MAX_THRESHOLD_BEFORE_2_35 = 1 << 25
"""Bytes; glibc before 2.35 refuses a larger mmap threshold."""


def _mmap_threshold() -> int:
    """Size in bytes from which the C library maps a block on its own: the largest value that it accepts."""
    library, version = platform.libc_ver()
    old = library == "glibc" and tuple(map(int, version.split(".")[:2])) < (2, 35)
    return _MAX_THRESHOLD_BEFORE_2_35 if old else _RETAINED_BYTES


_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mxfast=0"
"""2 MiB pages. No fast bins, because glibc consolidates all of them whenever a large block is freed."""
_MALLOPT = {
    "MALLOC_MMAP_THRESHOLD_": (-3, _mmap_threshold()),
    "MALLOC_TRIM_THRESHOLD_": (-1, _RETAINED_BYTES),
    "MALLOC_TOP_PAD_": (-2, 1 << 26),
}
"""Environment variable -> (`mallopt` parameter number, value in bytes)."""
ALLOCATOR_ENVIRONMENT = {name: str(value) for name, (_, value) in _MALLOPT.items()} | {"GLIBC_TUNABLES": _TUNABLES}
"""Environment variables of a process that runs a model."""


def keep_freed_memory() -> None:
    """Apply the `mallopt` settings to the running process, for a process that started without the environment.

    Does nothing where the user has set allocator variables.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOPT.values():
            mallopt(parameter, min(value, 2**31 - 1))  # mallopt takes a C int
