"""Selection of a backend. Called in two places only: where training builds a model and where a stage loads one.

| backend | implementation | selected by `auto` for |
|---|---|---|
| torch | PyTorch; C++ kernels or CUDA graphs for generation | short runs; sharded parameters |
| cpu | C++ kernels for blocks and head | supported models on a CPU with a C++ compiler |
| compiled | torch.compile | other models, if the run is long enough to repay compilation |
"""

import shutil
import time
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import nn

from ingot.backends.compiled import CompiledBackend
from ingot.backends.cpu_blocks import CPUBackend, CPUDecodeBackend
from ingot.backends.estimate import has_kernel
from ingot.core.errors import UserError
from ingot.kernels import cpu_train
from ingot.model.backend import TORCH, Backend
from ingot.model.transformer import Transformer

_MIN_COMPILED_S = {"cpu": 300.0, "cuda": 60.0}
"""Seconds of training from which compilation pays: it takes 20 to 40 s and makes steps 10 to 40 % faster."""
_UTILISATION = 0.5
"""Assumed speed of a training step, as a fraction of that of matrix products."""


class Training(TypedDict):
    """The run that a model is built for."""

    shape: tuple[int, int]
    """Rows and tokens of a full micro-batch."""
    flops: float
    """FLOPs of the complete run."""


def select(
    model: nn.Module,
    device: str,
    dtype: torch.dtype,
    *,
    name: str = "auto",
    training: Training | None = None,
    notify: Callable[[str], None] | None = None,
) -> Backend:
    """The backend of a model.

    Args:
        device: "cpu" or "cuda".
        dtype: of matrix products.
        name: "torch", "compiled", "cpu", or "auto" for the fastest.
        training: the run; None if the model is not trained.
        notify: receives a message when kernels are built, which takes seconds, and when torch.compile fails and PyTorch
            computes instead; without it that is an error.

    Raises:
        UserError: the named backend does not support this model on this machine.
    """
    if not isinstance(model, Transformer) or any(type(p) is not nn.Parameter for p in model.parameters()):
        return TORCH  # parameters of a subclass may be sharded, and a kernel would read one shard as the full tensor
    base = _base(device, notify)
    if name == "torch":
        return base
    if name == "compiled":
        return _compiled(base, model, device, training, notify)
    on_cpu = _trains_on_cpu(model, device, dtype, notify) if training else device == "cpu"
    if name == "cpu" and not on_cpu and training:
        raise UserError(
            'loop.backend: found "cpu" for a model, device or precision that its kernels do not support, or no C++ '
            'compiler; use "auto"'
        )
    if on_cpu:
        return CPUBackend(notify)
    if training and dtype != torch.float64 and _repays_compiling(device, dtype, training["flops"]):
        return _compiled(base, model, device, training, notify)
    return base


def _base(device: str, notify: Callable[[str], None] | None) -> Backend:
    """PyTorch, with the device's kernels for generation and the head."""
    if device.startswith("cuda"):
        from ingot.backends.cuda import CUDABackend

        return CUDABackend()
    return CPUDecodeBackend(notify)


def _compiled(
    base: Backend, model: Transformer, device: str, training: Training | None, notify: Callable[[str], None] | None
) -> Backend:
    if training is None:
        return base
    if not _has_compiler():
        raise UserError(
            'loop.backend: found "compiled" but no C++ compiler on the PATH, expected c++, g++ or clang++; install '
            'one, or use "auto"'
        )
    segmented = model.checkpointing not in ("none", "selective")
    return CompiledBackend(base, device.split(":")[0], model.config.depth, training["shape"], notify, segmented)


def _trains_on_cpu(model: Any, device: str, dtype: torch.dtype, notify: Callable[[str], None] | None) -> bool:
    """Whether the C++ kernels can train this model; builds them."""
    supported = all(p.requires_grad for p in model.parameters()) and not model.config.dropout
    return device == "cpu" and supported and has_kernel(model.config) and cpu_train.available(dtype, notify)


def _has_compiler() -> bool:
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def _repays_compiling(device: str, dtype: torch.dtype, flops: float) -> bool:
    if not _has_compiler() or flops <= 0:
        return False
    return flops / (_UTILISATION * _matmul_rate(device, dtype)) > _MIN_COMPILED_S[device.split(":")[0]]


def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of medium size, measured in a few hundredths of a second."""
    a, b = torch.zeros(2, 1024, 1024, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (a @ b)[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times)
