"""Muon for matrices of which a rank has a part.

The momentum of a part needs no other parts; orthogonalising does. So each rank gathers the momentum of one matrix at a
time, orthogonalises it with torch's own function, and applies its part of the result. That equals torch's Muon on whole
matrices bit for bit; running torch's on parts that are multiplied in parallel differs by 0.2 % after six steps, because
the iteration is in bf16.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

Gather = Callable[[Tensor, Tensor], Tensor]
"""(a tensor like this rank's part of a parameter, that part) -> the whole tensor."""
Cut = Callable[[Tensor, Tensor], Tensor]
"""(a whole tensor, this rank's part of a parameter) -> this rank's part of the tensor."""


class ShardedMuon:
    """torch.optim.Muon with `match_rms_adamw`, on parts of matrices.

    Args:
        param_groups: dicts with `params` (this rank's parts) and `weight_decay`.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        lr: float,
        *,
        momentum: float,
        nesterov: bool,
        gather: Gather,
        cut: Cut,
    ):
        self.param_groups = [{**group, "lr": lr, "momentum": momentum} for group in param_groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._nesterov, self._gather, self._cut = nesterov, gather, cut

    @torch.no_grad()
    def step(self) -> None:
        """Update all parts that have a gradient; every rank calls it, because ranks gather together."""
        coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for part in (p for p in group["params"] if p.grad is not None):
                state = self.state[part]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(part))
                buffer.lerp_(part.grad, 1 - momentum)
                update = part.grad.lerp(buffer, momentum) if self._nesterov else buffer
                whole = self._gather(update, part)
                whole = _muon._zeropower_via_newtonschulz(whole, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS)
                rate = _muon._adjust_lr(lr, "match_rms_adamw", whole.shape)
                part.mul_(1 - lr * group["weight_decay"])
                part.add_(self._cut(whole, part), alpha=-rate)
