"""Matrix products as decoding needs them: few rows, the same weights again and again.

With few rows a product costs what reading its weights costs, if its kernel lets it. So layers that read the same input
become one product, and the weights are laid out once as their kernel wants them: on a CPU with a compiler in panels for
a function of our own (`native.py`), which one row, several and prompts read alike.

The layers of a model of width 768, GB/s of weights read and GFLOP/s, two cores of a Zen 4 whose memory reads 33 and
whose products reach 434 in bf16 and 217 in fp32:

                       bf16: oneDNN   panels    fp32: oneDNN   panels
    1 row, GB/s                  24       34              25       33
    2 rows                       22       33              22       33
    4 rows                       26       30              28       33
    32 rows, GFLOP/s            352      420             185      214
    128 rows                    415      428             208      219
    2,048 rows                  438      422             216      218

By matrix tiles, two cores of a Xeon, bf16, ms for the same layers six times (weights as they are stored, for one row):

    rows          1     2     4     8    16    32    64   512
    oneDNN     2.57  2.53  2.53  2.56  2.79  3.36  5.36  27.6
    stored     1.96
    panels     1.97  1.95  2.00  2.10  2.20  2.55  4.99  26.7

Rejected: `torch.mv` (fp32 as `F.linear`, bf16 slower), all weights by input (fp32 1.5 times as fast as `F.linear` with
one row, no faster with 32).

Shapes: M rows, I inputs, O outputs, all layers side by side.
"""

import platform
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.kernels import cpu_decode
from ingot.model.lora import Held

_ROWS = 6
"""That oneDNN lays weights out for: any number can be multiplied with them."""


class Way(Enum):
    """How weights are laid out, and who multiplies with them."""

    PANELS = auto()
    """Our own function."""
    ONEDNN = auto()
    TORCH = auto()


class Product(Protocol):
    """Rows times weights: M x I in the precision of the weights to M x O in that or in fp32."""

    def __call__(self, x_MI: Tensor, onto_MO: Tensor | None = None) -> Tensor:
        """The product, or what it is added to: the same tensor, which holds the sum then."""
        ...


def way(device: torch.device, dtype: torch.dtype, own: bool) -> Way:
    """The fastest for such weights.

    Args:
        own: our own functions are there (`native.available`).
    """
    if own:
        return Way.PANELS
    return Way.ONEDNN if _packs(device, dtype) else Way.TORCH


def product(layers: Sequence[nn.Linear], dtype: torch.dtype, way: Way, order_O: Tensor | None = None) -> Product:
    """Several linear layers of one input as one product.

    Args:
        order_O: which output of the layers, side by side, stands where; None: as they are.
    """
    order = slice(None) if order_O is None else order_O
    weight_OI = torch.cat([matrix(layer).to(dtype) for layer in layers])[order]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "layers with and without a bias side by side"
    return _product(weight_OI, torch.cat(biases)[order] if biases else None, way)


def gated(gate: nn.Linear, up: nn.Linear, dtype: torch.dtype, way: Way) -> Callable[[Tensor], Tensor]:
    """silu(gate) * up as one product: M x I to M x F."""
    if way is not Way.PANELS:
        together = product([gate, up], dtype, way)
        return lambda x_MI: _swiglu(together(x_MI))
    assert (gate.bias is None) == (up.bias is None), "layers with and without a bias side by side"
    panels = cpu_decode.pack_gated(*(matrix(layer).to(dtype) for layer in (gate, up)))
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).float()
    return partial(cpu_decode.gated, panels, gate.out_features, bias)


def gelu(up: nn.Linear, approximate: str, dtype: torch.dtype, way: Way) -> Callable[[Tensor], Tensor]:
    """GELU of a product, exact or by "tanh"."""
    if way is not Way.PANELS:
        together = product([up], dtype, way)
        return lambda x_MI: F.gelu(together(x_MI), approximate=approximate)
    bias = None if up.bias is None else up.bias.float()
    panels = cpu_decode.pack(matrix(up).to(dtype))
    return partial(cpu_decode.gelu, panels, up.out_features, bias, approximate == "tanh")


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def matrix(layer: nn.Linear) -> Tensor:
    """What a layer multiplies with, its adapter included."""
    if isinstance(layer, Held):
        return layer.effective()
    assert type(layer) is nn.Linear, f"{type(layer).__name__}: its weights are not known to be all of it"
    return layer.weight


def head_product(weight_VW: Tensor, dtype: torch.dtype, way: Way) -> Product:
    """The head: M x W to M x V."""
    return _product(weight_VW.to(dtype), None, way)


def _product(weight_OI: Tensor, bias_O: Tensor | None, way: Way) -> Product:
    if way is Way.PANELS:
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        return partial(cpu_decode.product, cpu_decode.pack(weight_OI), len(weight_OI), bias_O)
    bias_O = None if bias_O is None else bias_O.to(weight_OI.dtype)
    if way is Way.TORCH:
        return partial(_added, lambda x_MI: F.linear(x_MI, weight_OI, bias_O))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _ROWS)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return partial(_added, lambda x_MI: linear(x_MI, packed, bias_O, "none", [], ""))


def _added(function: Callable[[Tensor], Tensor], x_MI: Tensor, onto_MO: Tensor | None = None) -> Tensor:
    out_MO = function(x_MI)
    return out_MO if onto_MO is None else onto_MO.add_(out_MO)


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout of its own for such weights."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if device.type != "cpu" or not x86 or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
