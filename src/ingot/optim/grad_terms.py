"""Anchors: penalties on the distance of the weights from earlier values.

Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796, eq. 3) adds (weight / 2) sum_i F_i (theta_i -
theta*_i)^2, with F the Fisher information of the old task at its optimum theta*; L2-SP (Li et al. 2018,
arXiv:1802.01483) is the same with F = 1. The gradient, weight * F (theta - theta*), has no factor 1/2. F must be the
information per token, because the loss is a mean over tokens.

The gradient is added to `.grad` once per update, after micro-batches and ranks are summed and the loss scale is
removed, because it does not depend on the batch. It is elementwise, so it works on shards as well.

The weights may be leaves (one addition each) or functions of trained parameters, such as weights with a merged adapter;
the backward pass then propagates the gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchor:
    """(weight / 2) sum_i importance_i (theta_i - center_i)^2."""

    name: str
    """Name in the log."""
    weight: float
    center: Mapping[str, Tensor]
    """theta* by parameter name. Parameters without an entry are not penalised."""
    importance: Mapping[str, Tensor] | None = None
    """F by parameter name, of the same shapes; None: 1 everywhere."""

    def add_gradients(
        self, weights: Mapping[str, Tensor], sum_of_shards: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> dict[str, Tensor]:
        """Add the gradient to `.grad` of the trained parameters. Returns the penalty and its gradient norm by name.

        Args:
            weights: the weights that the model computes with, by name; frozen ones are ignored.
            sum_of_shards: sums a tensor over the ranks of which each has a part of the weights.
        """
        value = square = torch.zeros((), dtype=torch.float64)
        for name, weight in weights.items():
            if name not in self.center or not weight.requires_grad:
                continue
            offset = weight.detach() - self.center[name]
            gradient = offset * self.weight if self.importance is None else offset * self.importance[name] * self.weight
            value = value + 0.5 * torch.sum(gradient * offset, dtype=torch.float64).to(value.device)
            square = square + torch.sum(gradient.square(), dtype=torch.float64).to(square.device)
            weight.backward(gradient, retain_graph=True)
        return {self.name: sum_of_shards(value), f"{self.name}_grad_norm": sum_of_shards(square).sqrt()}


def prepare_importance(
    importance: Mapping[str, Tensor], clip: float = 1.0, floor: float = 0.0, normalise: bool = False
) -> dict[str, Tensor]:
    """Importances for an anchor: clipped at a quantile, raised to a floor, optionally normalised to a mean of 1.

    Args:
        importance: a diagonal Fisher information by parameter name.
        clip: values above this quantile of all values are clipped to it; 1 clips nothing.
        floor: smallest value, as a fraction of the mean.
        normalise: whether to divide by the mean.
    """
    out = dict(importance)
    if clip < 1:
        values = np.concatenate([f.detach().cpu().numpy().ravel() for f in out.values()])
        rank = round(clip * (len(values) - 1))
        out = {name: f.clamp(max=float(np.partition(values, rank)[rank])) for name, f in out.items()}
    mean = mean_importance(out)
    if floor:
        out = {name: f.clamp(min=floor * mean) for name, f in out.items()}
        mean = mean_importance(out)
    return {name: f / mean for name, f in out.items()} if normalise and mean else out


def mean_importance(importance: Mapping[str, Tensor]) -> float:
    """The mean over all elements of all tensors."""
    total = sum(float(f.sum(dtype=torch.float64)) for f in importance.values())
    return total / max(1, sum(f.numel() for f in importance.values()))
