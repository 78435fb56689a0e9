"""The measured peak of this machine's matrix products, by dtype.

It is measured because a virtual machine has no data sheet. A peak is the best of the implementations in torch: on a CPU
its BLAS and oneDNN, which differ by up to 2x in fp32.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

N = 2048
"""Size of the square matrices."""
Summary = Callable[[Sequence[float]], float]


def duration(call: Callable[[], object], seconds: float, summary: Summary = min) -> float:
    """Seconds per call, from at least three calls after a warm-up.

    Args:
        seconds: length of the measurement.
        summary: the shortest duration, or another summary of all durations.
    """
    call()
    durations, window_start = list[float](), time.perf_counter()
    while len(durations) < 3 or time.perf_counter() - window_start < seconds:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return summary(durations)


def gemm_flops(dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the fastest product of two square matrices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 4 * N if device == "cuda" else N
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    products: list[Callable[[], Tensor]] = [lambda: a @ b, lambda: a @ b.T]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    return 2 * n**3 / min(duration(product, seconds) for product in products)
