"""Matrix products as decoding needs them: few rows, the same weights again and again.

With few rows a product costs what reading its weights costs, if its kernel lets it. So layers that read the same input
become one product. One row is multiplied by a function of our own (`native.py`), where there is a compiler. For several
rows the weights are laid out once on an x86 CPU as oneDNN's kernels want them (blocks of 16 x 64). GB/s of weights
read, 2 cores with AVX-512 bf16 whose dot product of a long vector reads 36, torch 2.13; 768 features:

                               fp32: `F.linear`   laid out    bf16: `F.linear`   laid out
    1 row, 2,304 out                     10       21 to 29              13       20 to 25
    1 row, 50,257 out                    13       26 to 30              13             29
    32 rows, 2,304 out (GFLOP/s)         94            137             203            318
    32 rows, 4,096 out (GFLOP/s)         90            176

The greater figures of a range are of rows filled up to `FULL`: the kernels for 4 and 6 rows read faster than those for
1 and 2. On a CPU with matrix tiles nothing is gained by that.

With AVX2 alone one row is read faster as it is: 4,096 x 768 in fp32 at 22 GB/s, filled up at 15 (2 cores of a Zen 3,
whose memory reads 32). It has no products in bf16. On every CPU calling oneDNN costs 15 to 40 us, so small weights in
fp32 go to MKL, stored by input: 384 x 128 with one row takes 10 us there, 38 laid out, with 32 rows 53 and 73.

Rejected: `torch.mv` (fp32 as `F.linear`, bf16 slower), all weights by input (fp32 1.5 times as fast as `F.linear` with
one row, no faster with 32), and a kernel of our own for 32 rows, which holds a weight against a register of rows: 350
to 385 GFLOP/s in bf16 and 175 to 200 in fp32 on a Zen 4, where oneDNN makes 345 to 400 and 185 to 195.

Shapes: M rows, I inputs, O outputs, all layers side by side.
"""

import platform
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.infer import native
from ingot.model import multiply
from ingot.model.lora import Held

FULL = 6
"""Rows that a product should have at least where that is faster than fewer; who calls it often fills them up."""
_PACKED = (torch.float32, torch.bfloat16)
_SMALL, _SMALL_BESIDE_TILES = 1 << 17, 1 << 19
"""Weights up to which calling oneDNN costs more than it gains in fp32."""


def product(
    layers: Sequence[nn.Linear], dtype: torch.dtype, single: bool, order_O: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Several linear layers of one input as one product: M x I in that precision to M x O in that or in fp32.

    Args:
        single: one row at a time is to be fast, rather than several; where `native.able`.
        order_O: which output of the layers, side by side, stands where; None: as they are.
    """
    order = slice(None) if order_O is None else order_O
    weight_OI = torch.cat([matrix(layer).to(dtype) for layer in layers])[order]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "layers with and without a bias side by side"
    return _product(weight_OI, torch.cat(biases)[order].to(dtype) if biases else None, single)


def matrix(layer: nn.Linear) -> Tensor:
    """What a layer multiplies with, its adapter included."""
    if isinstance(layer, Held):
        return layer.effective()
    assert type(layer) is nn.Linear, f"{type(layer).__name__}: its weights are not known to be all of it"
    return layer.weight


def head_product(weight_VW: Tensor, dtype: torch.dtype, single: bool) -> Callable[[Tensor], Tensor]:
    """The head: M x W to M x V."""
    return _product(weight_VW.to(dtype), None, single)


def _product(weight_OI: Tensor, bias_O: Tensor | None, single: bool) -> Callable[[Tensor], Tensor]:
    device, dtype = weight_OI.device, weight_OI.dtype
    if single:
        return partial(_one_row, weight_OI.contiguous(), bias_O)
    if not packs(device, dtype):
        return lambda x_MI: F.linear(x_MI, weight_OI, bias_O)
    if _small(device, dtype, weight_OI.numel()):
        weight_IO = weight_OI.t().contiguous()
        return lambda x_MI: F.linear(x_MI, weight_IO.t(), bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), FULL)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_MI: linear(x_MI, packed, bias_O, "none", [], "")


def _one_row(weight_OI: Tensor, bias_O: Tensor | None, x_MI: Tensor) -> Tensor:
    """The product by our own function, and that of the tokens of a prompt as in training."""
    out_MO = native.linear(x_MI, weight_OI) if len(x_MI) == 1 else multiply.product(x_MI, weight_OI.t())
    return out_MO if bias_O is None else out_MO.add_(bias_O)


def fill(device: torch.device, dtype: torch.dtype, weights: int) -> int:
    """Rows that a product of so many weights should have at least: `FULL` where that is faster than fewer, else 1."""
    wide = torch.cpu._is_avx512_supported() and not tiled(device, dtype)
    return FULL if packs(device, dtype) and wide and not _small(device, dtype, weights) else 1


def _small(device: torch.device, dtype: torch.dtype, weights: int) -> bool:
    return dtype == torch.float32 and weights <= (_SMALL_BESIDE_TILES if tiled(device, dtype) else _SMALL)


def tiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix tiles multiply such weights, so that one row wants them laid out otherwise than several do."""
    return packs(device, dtype) and torch.cpu._is_amx_tile_supported()


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout of its own for such weights."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if device.type != "cpu" or not x86 or dtype not in _PACKED or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
