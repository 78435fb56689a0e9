"""Matrix products as decoding needs them: few rows, the same weights again and again.

With few rows a product costs what reading its weights costs, if its kernel lets it. So layers that read the same input
become one product, and on an x86 CPU the weights are laid out once as oneDNN's kernels want them (blocks of 16 x 64).
GB/s of weights read, 2 cores with AVX-512 bf16 whose dot product of a long vector reads 36, torch 2.13; 768 features:

                               fp32: `F.linear`   laid out    bf16: `F.linear`   laid out
    1 row, 2,304 out                     10       21 to 29              13       20 to 25
    1 row, 50,257 out                    13       26 to 30              13             29
    32 rows, 2,304 out (GFLOP/s)         94            137             203            318
    32 rows, 4,096 out (GFLOP/s)         90            176

The greater figures of a range are of rows filled up to `FULL`: the kernels for 4 and 6 rows read faster than those for
1 and 2. On a CPU with matrix tiles it is the other way round (two cores of a Sapphire Rapids, 50,257 out: one row of
bf16 25 GB/s, six 14; fp32 23 and 18), so nothing is filled up there; and 32 rows gain little over `F.linear` (bf16 8
to 14 GB/s against 7 to 11).

Rejected: `torch.mv` (fp32 as `F.linear`, bf16 slower), weights stored transposed (fp32 1.5 times as fast as `F.linear`
with one row, no faster with 32), one row as bags of `torch.embedding_bag` (bf16 1.0 to 1.25 times as fast as here, fp32
0.85), and the same kernel over weights as they are (fp32 with 32 rows 143 against 176, bf16 no faster than `F.linear`).

Shapes: M rows, I inputs, O outputs, all layers side by side.
"""

import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.lora import Held

FULL = 6
"""Rows that a product should have at least; fewer are filled up by whoever calls it often."""
_PACKED = (torch.float32, torch.bfloat16)


def product(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Several linear layers of one input as one product: M x I to M x O in that precision."""
    weight_OI = torch.cat([matrix(layer).to(dtype) for layer in layers])
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "layers with and without a bias side by side"
    return _product(weight_OI, torch.cat(biases).to(dtype) if biases else None)


def matrix(layer: nn.Linear) -> Tensor:
    """What a layer multiplies with, its adapter included."""
    if isinstance(layer, Held):
        return layer.effective()
    assert type(layer) is nn.Linear, f"{type(layer).__name__}: its weights are not known to be all of it"
    return layer.weight


def head_product(weight_VW: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The head: M x W to M x V."""
    return _product(weight_VW.to(dtype), None)


def _product(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    if not packs(weight_OI.device, weight_OI.dtype):
        return lambda x_MI: F.linear(x_MI, weight_OI, bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), FULL)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_MI: multiply(x_MI, packed, bias_O, "none", [], "")


def fill(device: torch.device, dtype: torch.dtype) -> int:
    """Rows that a product should have at least: `FULL` where that is faster than fewer, else 1."""
    tiles = torch.cpu._is_amx_tile_supported()  # whose CPUs read no faster for it
    return FULL if packs(device, dtype) and not tiles else 1


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout of its own for such weights."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return device.type == "cpu" and x86 and dtype in _PACKED and torch.backends.mkldnn.is_available()
