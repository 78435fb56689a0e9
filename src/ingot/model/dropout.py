"""Dropout (Srivastava et al. 2014, JMLR 15), whose coins are cheap on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 2**16


def dropout(x: Tensor, share: float, training: bool = True) -> Tensor:
    """`x` with about that share of its numbers put to zero, each by a coin of its own, and the others scaled up to fit.

    On a CPU torch takes a number of 64 bits for every coin, and its compiler draws them one by one. Here such a number
    is good for four, so `share` is rounded to a multiple of 2^-16, and the scale goes with it. `backends/aot_worker.py`
    leaves the drawing to torch's generator.
    """
    if not (share and training):
        return x
    if x.device.type != "cpu":
        return F.dropout(x, share)
    zeros = min(round(share * _LEVELS), _LEVELS - 1)  # less than all, as `share` is
    draws_n = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),))
    return x * torch.ops.ingot.coins(draws_n, x.shape, zeros) * (_LEVELS / (_LEVELS - zeros))


def _coins(draws_n: Tensor, shape: list[int], zeros: int) -> Tensor:
    """Coins of that shape out of a quarter as many draws, 0 `zeros` times in 65,536, else 1."""
    draws_N = draws_n.view(torch.int16)[: torch.Size(shape).numel()]
    return (draws_N.view(shape) >= zeros - _LEVELS // 2).view(torch.uint8)


# An operator of its own and of bytes, since the compiler has no vectors of 16 bits and reads truths one by one.
_library = torch.library.Library("ingot", "FRAGMENT")
_library.define("coins(Tensor draws, SymInt[] shape, int zeros) -> Tensor")
_library.impl("coins", _coins, "CPU")
torch.library.register_fake(
    "ingot::coins", lambda draws_n, shape, zeros: draws_n.new_empty(shape, dtype=torch.uint8), lib=_library
)
