"""Adam and AdamW: torch's own kernels, called without `torch.optim.Optimizer`.

Rejected: `torch.optim.AdamW`, which does the same to the bit. Its `step` imports torch's compiler, so every process
that trains would pay a second and 80 MB for it, also where nothing is compiled.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Kingma and Ba 2015, algorithm 1; decoupled: Loshchilov and Hutter 2019, algorithm 2.

    Args:
        param_groups: each with its `params` and `weight_decay`.
        decoupled: whether weights decay by themselves, and not as part of the gradient.
        fused: one kernel for all parameters; they are fp32 or fp64.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        fused: bool,
    ):
        self.param_groups = [{**group, "lr": lr} for group in param_groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.fused = fused
        beta1, beta2 = betas
        self._how = {"beta1": beta1, "beta2": beta2, "eps": eps, "decoupled_weight_decay": decoupled, "fused": fused}

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the first step of a parameter finds; the fused kernel counts steps where the parameter is."""
        count = torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": count, **moments}

    @property
    def divides(self) -> bool:
        """Whether its kernel divides gradients by a number as well, which saves reading and writing them before."""
        return self.fused and all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        """One update of all parameters that have a gradient, which is divided before, in place; `divisor` is fp32."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            for parameter, state in zip(params, states, strict=True):
                if not state:
                    state.update(self.initial_state(parameter))
            first, second, counts = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            adam(
                params,
                [p.grad for p in params if p.grad is not None],
                first,
                second,
                [],
                counts,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                **self._how,
            )
