"""The measured bandwidth of this machine's memory. (`ingot.train.gemm` measures matrix products.)"""

from collections.abc import Callable

import torch
from torch import Tensor

from ingot.train.gemm import Summary, duration

READ_BYTES = 1 << 29
"""Bytes of a read, more than any cache holds."""


def memory_reader(summary: Summary = min) -> Callable[[float], float]:
    """A function (seconds of the measurement) -> bytes per second that all threads together read from memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.ones(READ_BYTES // 4, device=device)
    matrix = data.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    reads: list[Callable[[], Tensor]] = [lambda: data.sum(), lambda: matrix @ vector]
    return lambda seconds: READ_BYTES / min(duration(read, seconds, summary) for read in reads)
