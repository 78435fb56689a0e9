"""The CPU's decoding as parameters of tests; none in a product without fast backends (`test_architecture.py`)."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_BACKENDS = find_spec("ingot.backends") is not None
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16} if HAS_BACKENDS else {}


def cpu_backend() -> Any:
    from ingot.backends.cpu_blocks import CPUDecodeBackend

    return CPUDecodeBackend()


def cpu_ops(dtype: torch.dtype) -> Any:
    from ingot.backends.cpu_decode import CPUOps

    return CPUOps(dtype, torch.float32)


def cpu_params(values: Callable[[torch.dtype], tuple[Any, ...]]) -> list[Any]:
    """One parameter set a precision, skipped without a C++ compiler.

    Args:
        values: precision -> the values of the set.
    """
    return [
        pytest.param(*values(dtype), id=f"cpu, {name}", marks=without_kernels(dtype)) for name, dtype in _DTYPES.items()
    ]


def without_kernels(dtype: torch.dtype) -> Any:
    from ingot.kernels import cpu_decode

    missing = not cpu_decode.available(torch.device("cpu"), dtype, torch.float32)
    return pytest.mark.skipif(missing, reason="no C++ compiler")
