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
1 and 2. On a CPU with matrix tiles nothing is gained by that, and oneDNN is slow with one row (its tiles hold 16) and
with small weights (its call costs 40 us). There weights that meet one row, and small ones in fp32, are stored by input
instead. us for the four products of a layer of 768 features, two cores of a Sapphire Rapids that read 21 GB/s:

                  fp32: laid out   by input    bf16: laid out   by input   by input, in bags
    1 row                  2,290      1,860             1,190      1,630                 730
    2 rows                 2,900      3,160             1,290      1,580               1,240
    32 rows                5,150      5,440             1,390      1,560
    1 row of 256             330        220               300        380                 230
    32 rows of 256           700        570               370        380

With AVX2 alone one row is read faster as it is: 4,096 x 768 in fp32 at 22 GB/s, filled up at 15 (2 cores of a Zen 3,
whose memory reads 32). It has no products in bf16. On every CPU calling oneDNN costs 15 to 40 us, so small weights in
fp32 go to MKL: 384 x 128 with one row takes 10 us there, 38 laid out, with 32 rows 53 and 73.

In bags: the product with one row is a weighted sum of the weights' rows, and `torch.embedding_bag` fetches rows ahead,
which is what reading memory at its speed takes.

Rejected without tiles: `torch.mv` (fp32 as `F.linear`, bf16 slower), weights by input (fp32 1.5 times as fast as
`F.linear` with one row, no faster with 32), bags (bf16 1.0 to 1.25 times as fast as here, fp32 0.85), and the same
kernel over weights as they are (fp32 with 32 rows 143 against 176, bf16 no faster than `F.linear`). With tiles: reading
the weights into the cache before the product (from there it takes half as long, but the reading takes the other half).

Shapes: M rows, I inputs, O outputs, all layers side by side.
"""

import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.lora import Held

FULL = 6
"""Rows that a product should have at least where that is faster than fewer; who calls it often fills them up."""
_PACKED = (torch.float32, torch.bfloat16)
_SMALL, _SMALL_BESIDE_TILES = 1 << 17, 1 << 19
"""Weights up to which calling oneDNN costs more than it gains in fp32."""
_BAG = 64
"""Inputs that a bag has at least: fewer are summed sooner than a thread is woken."""
_SUM = 0


def product(
    layers: Sequence[nn.Linear], dtype: torch.dtype, single: bool, order_O: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Several linear layers of one input as one product: M x I in that precision to M x O in that or in fp32.

    Args:
        single: one row at a time is to be fast, rather than several.
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
    if not packs(device, dtype):
        return lambda x_MI: F.linear(x_MI, weight_OI, bias_O)
    if _small(device, dtype, weight_OI.numel()) or (single and tiled(device, dtype)):
        return _by_input(weight_OI, bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), FULL)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_MI: multiply(x_MI, packed, bias_O, "none", [], "")


def _by_input(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product over weights stored by input, whose weighted sum one row of bf16 is: one bag of them a thread."""
    weight_IO, inputs = weight_OI.t().contiguous(), weight_OI.shape[1]
    inputs_I = torch.arange(inputs, dtype=torch.int32)
    bags_P = torch.arange(0, inputs, max(_BAG, -(-inputs // torch.get_num_threads())), dtype=torch.int32)

    def multiply(x_MI: Tensor) -> Tensor:
        if len(x_MI) > 1 or x_MI.dtype == torch.float32:
            return F.linear(x_MI, weight_IO.t(), bias_O)
        out_MO = weighed(weight_IO, inputs_I, bags_P, x_MI.view(-1)).sum(0, keepdim=True, dtype=torch.float32)
        return out_MO if bias_O is None else out_MO.add_(bias_O)

    return multiply


def weighed(table_NO: Tensor, places_I: Tensor, bags_P: Tensor, weights_I: Tensor) -> Tensor:
    """Weighted sums of a table's rows, P x O, on a CPU at the memory's speed.

    Args:
        places_I: which rows, int32, bag after bag.
        bags_P: where each bag begins among them, int32.
    """
    return torch.embedding_bag(table_NO, places_I, bags_P, False, _SUM, False, weights_I)[0]


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
