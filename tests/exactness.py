"""The comparison that the tests of kernels, backends and decoding share.

A faster computation must be about as near to float64 as PyTorch is in the same precision.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FLOOR = {torch.bfloat16: 2e-3, torch.float32: 5e-7, torch.float64: 1e-13}
"""Relative error that is allowed beside PyTorch's: what another order of sums costs."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the shape and the seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def error(found: Tensor, exact: Tensor, scale: float = 0.0) -> float:
    """The relative error as a quotient of norms, the divisor at least `scale`."""
    assert found.shape == exact.shape, f"found {tuple(found.shape)}, expected {tuple(exact.shape)}"
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp(min=max(scale, 1e-30)))


def failures(
    found: Mapping[str, Tensor],
    torchs: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    floor: float,
    factor: float = 1.3,
) -> list[str]:
    """Tensors that are farther from the exact ones than `factor` times PyTorch's by more than `floor`.

    A tensor that is zero but for rounding, as the gradient of a key's bias is, is measured by the largest of all.
    """
    assert found.keys() == torchs.keys() == exact.keys(), found.keys() ^ exact.keys()
    largest = max(float(x.detach().double().norm()) for x in exact.values())
    failed = []
    for name, value in exact.items():
        scale = largest if float(value.detach().double().norm()) < 1e-9 * largest else 0.0
        own, of_torch = error(found[name], value, scale), error(torchs[name], value, scale)
        if not own <= factor * of_torch + floor:  # also where it is NaN
            failed.append(f"{name}: error {own:.3g}, of torch {of_torch:.3g}")
    return failed
