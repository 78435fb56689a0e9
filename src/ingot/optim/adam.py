"""Adam and AdamW by torch's kernels, without `torch.optim.Optimizer`.

The results equal those of `torch.optim` bit for bit. That class imports torch's compiler at the first `step`, which
costs every training process a second and 80 MB.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1), or AdamW (Loshchilov and Hutter 2019, algorithm 2) if decoupled.

    Args:
        param_groups: dicts with `params` and `weight_decay`.
        decoupled: whether weight decay multiplies the weights; else it is added to the gradient.
        fused: whether to use the fused kernel; parameters must then be fp32 or fp64.
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
        self._options = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "decoupled_weight_decay": decoupled,
            "fused": fused,
        }

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step. The fused kernel counts steps on the parameter's device."""
        count = torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": count, **moments}

    @property
    def supports_grad_scale(self) -> bool:
        """Whether the kernel can also divide the gradients by a number, which saves a pass over them."""
        return self.fused and all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update all parameters that have a gradient.

        Args:
            divisor: fp32 scalar; gradients are divided by it in place first.
            found_inf: fp32 scalar for the fused kernel; if it is 1, weights, moments and count do not change.
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            for parameter, state in zip(params, states, strict=True):
                if not state:
                    state.update(self.initial_state(parameter))
            self._update(group, params, states, divisor, found_inf)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        first, second, counts = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._kernel(group, parameters, gradients, first, second, counts, divisor, found_inf)

    def _kernel(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        counts: list[Tensor],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        adam(
            parameters,
            gradients,
            first,
            second,
            [],
            counts,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
            **self._options,
        )
