"""Penalties that are functions of the weights alone: an anchor pulls each weight back to where it was.

Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796, eq. 3) adds (weight / 2) sum_i F_i (theta_i -
theta*_i)^2, with F the Fisher information of the old task at its optimum theta*; L2-SP (Li et al. 2018,
arXiv:1802.01483) is the same with F = 1. The gradient, weight * F (theta - theta*), is added to `.grad` once a step,
after micro-batches and ranks were summed and any loss scale was divided out: it does not depend on the batch, so it
would otherwise be counted as often as the batch is cut. It needs no graph, and is elementwise, so shards stay shards.

The weights may be leaves (then this is one addition) or functions of others, such as a matrix with an adapter merged
into it: backward carries the pull on to whatever is trained.

Two factors of the published term are easily lost: the gradient has no 1/2, and F belongs to a mean over tokens, like
the loss it stands beside.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchor:
    """(weight / 2) sum_i importance_i (theta_i - center_i)^2."""

    name: str
    """What logs call it."""
    weight: float
    center: Mapping[str, Tensor]
    """theta*, by parameter; a parameter that is not here is free."""
    importance: Mapping[str, Tensor] | None = None
    """F, of the same shapes; None: 1 everywhere."""

    def pull(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the gradient to `.grad` of what is trained; returns the penalty and the norm of its gradient, by name.

        Args:
            weights: the weights the model computes with, by name; frozen ones are passed over.
        """
        value = square = torch.zeros((), dtype=torch.float64)
        for name, weight in weights.items():
            if name not in self.center or not weight.requires_grad:
                continue
            away = weight.detach() - self.center[name]
            force = away * self.weight if self.importance is None else away * self.importance[name] * self.weight
            value = value + 0.5 * torch.sum(force * away, dtype=torch.float64).to(value.device)
            square = square + torch.sum(force.square(), dtype=torch.float64).to(square.device)
            weight.backward(force, retain_graph=True)
        return {self.name: value, f"{self.name}_grad_norm": square.sqrt()}


def shaped(
    importance: Mapping[str, Tensor], clip: float = 1.0, floor: float = 0.0, normalise: bool = False
) -> dict[str, Tensor]:
    """Importances made fit to be anchors: long tail cut, a least value, a mean of 1.

    Args:
        importance: a diagonal Fisher information, by parameter.
        clip: the quantile of all values above which none stays; 1 cuts nothing.
        floor: least value as a share of the mean.
        normalise: divide by the mean, so that a weight means the same for every model.
    """
    out = dict(importance)
    if clip < 1:
        values = np.concatenate([f.detach().cpu().numpy().ravel() for f in out.values()])
        rank = round(clip * (len(values) - 1))
        out = {name: f.clamp(max=float(np.partition(values, rank)[rank])) for name, f in out.items()}
    mean = mean_of(out)
    if floor:
        out = {name: f.clamp(min=floor * mean) for name, f in out.items()}
        mean = mean_of(out)
    return {name: f / mean for name, f in out.items()} if normalise and mean else out


def mean_of(importance: Mapping[str, Tensor]) -> float:
    """The mean over all elements of all tensors."""
    total = sum(float(f.sum(dtype=torch.float64)) for f in importance.values())
    return total / max(1, sum(f.numel() for f in importance.values()))
