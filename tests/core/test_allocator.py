"""glibc's allocator: what is freed is kept, unless the user says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from ingot.core import allocator
from ingot.core.allocator import ALLOCATOR_ENVIRONMENT

TOUCHED = """
import ctypes, resource, sys
from ingot.core.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = []
for _ in range(4):
    before.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    blocks = [libc.malloc(1 << 24) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 24)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own settings")
def test_freed_memory_is_kept_unless_the_user_says_otherwise() -> None:
    """Pages touched by the last of four rounds of four blocks of 16 MB: none where the earlier ones' are kept."""

    def pages(how: str, **environment: str) -> int:
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        done = subprocess.run(
            [sys.executable, "-c", TOUCHED, how], env=bare | environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert pages("kept") < 10 < 4000 < pages("as it is")
    assert pages("as it is", **ALLOCATOR_ENVIRONMENT) < 10
    assert pages("kept", MALLOC_MMAP_THRESHOLD_="65536") > 4000
    assert pages("kept", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=65536") > 4000


@pytest.mark.parametrize(
    ("library", "version", "most"),
    [("glibc", "2.34", 1 << 25), ("glibc", "2.35", 1 << 32), ("glibc", "2.9", 1 << 25), ("", "", 1 << 32)],
)
def test_an_old_glibc_refuses_a_threshold_beyond_half_a_heap(monkeypatch, library, version, most) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, version))
    assert allocator._mmap_threshold() == most
