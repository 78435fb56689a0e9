"""Averages of the weights over steps (Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407).

Late steps of training oscillate around an optimum, and their average is closer to it. Evaluations and saved models use
the average; training continues from the weights themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ingot.optim.groups import Named


class Average:
    """An exponential moving average of each parameter; `decay` = 0 disables it.

    a <- a + max(1 - decay, 1 / step) (w - a): during the first 1 / (1 - decay) steps it is the plain mean, so the
    initial weights do not bias short runs.
    """

    def __init__(self, named: Named, decay: float):
        self._decay = decay
        self._weights = {name: p.detach() for name, p in named.items()} if decay else {}
        self._averages = {name: weight.clone() for name, weight in self._weights.items()}

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        """Update the averages with the weights after `step`, counted from 1.

        Args:
            skipped: boolean scalar; if it is true, the averages do not change. A GPU is not waited for.
        """
        if not self._weights or (skipped is not None and not skipped.is_cuda and skipped):
            return
        fraction: Any = max(1 - self._decay, 1 / step)
        averages, weights = list(self._averages.values()), list(self._weights.values())
        if skipped is not None and skipped.is_cuda:
            fraction = [(~skipped).to(weights[0].dtype) * fraction] * len(weights)
        torch._foreach_lerp_(averages, weights, fraction)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        # Swap values, not tensors: compiled code and optimizers refer to the tensors.
        for name, weight in self._weights.items():
            current = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self._averages)
