"""What a process asks of the system it runs on."""

import os
import platform
import subprocess
import sys

import pytest

TOUCHED = """
import ctypes, resource, sys
from ingot.core.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 26)
    ctypes.memset(block, 1, 1 << 26)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_freed_memory_is_kept_unless_the_user_says_otherwise() -> None:
    """Pages touched by the third of three equal blocks of 64 MB: none where the second one's were kept."""

    def pages(how: str, **environment: str) -> int:
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        done = subprocess.run(
            [sys.executable, "-c", TOUCHED, how], env=bare | environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert pages("kept") < 10 < pages("as it is")
    assert pages("kept", MALLOC_MMAP_THRESHOLD_="65536") > 10
