"""The most that this machine gives: matrix products by type, and reading memory. Measured, since data sheets of a
virtual machine's share of a processor do not exist.

The peak is the best of what torch offers: on a CPU both its BLAS and oneDNN, which differ by 2x in fp32 on some.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

N = 2048
"""Size of the square matrices."""
READ = 1 << 29
"""Bytes that are read at a time: more than any cache holds."""
Summary = Callable[[Sequence[float]], float]


def duration(call: Callable[[], object], seconds: float, of: Summary = min) -> float:
    """Duration of a call within about that many seconds, of three calls at least after one to warm up.

    Args:
        of: the shortest of several, or another summary of them.
    """
    call()
    durations, began = list[float](), time.perf_counter()
    while len(durations) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return of(durations)


def gemm_flops(dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the fastest product of two square matrices of that type."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    n = 4 * N if where == "cuda" else N
    a, b = torch.randn(2, n, n, device=where).to(dtype)
    ways: list[Callable[[], Tensor]] = [lambda: a @ b, lambda: a @ b.T]
    if where == "cpu" and torch.backends.mkldnn.is_available():
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    return 2 * n**3 / min(duration(way, seconds) for way in ways)


def memory(of: Summary = min) -> Callable[[float], float]:
    """What measures, within so many seconds, the bytes a second that all threads together read from memory."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.ones(READ // 4, device=where)
    matrix = data.view(-1, 4096)
    vector = torch.ones(4096, device=where)
    ways: list[Callable[[], Tensor]] = [lambda: data.sum(), lambda: matrix @ vector]
    return lambda seconds: READ / min(duration(way, seconds, of) for way in ways)
