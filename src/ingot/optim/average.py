"""Averages of weights over steps (Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407).

Late steps of training wander around a point that none of them stands on; their average is nearer to it. It is evaluated
and kept in place of the weights, while training itself goes on from these.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ingot.optim.groups import Named


class Average:
    """An exponential moving average of each of these parameters; of none where `decay` is 0.

    Early on, 1 / (1 - decay) steps or fewer, it is their plain mean, so that nothing of the start weighs on a short
    run: a = a + max(1 - decay, 1 / step) (w - a).
    """

    def __init__(self, named: Named, decay: float):
        self._decay = decay
        self._weights = {name: p.detach() for name, p in named.items()} if decay else {}
        self._averages = {name: weight.clone() for name, weight in self._weights.items()}

    def update(self, step: int) -> None:
        """Take in the weights as they are after this step, counted from 1."""
        if self._weights:
            share = max(1 - self._decay, 1 / step)
            averages, weights = list(self._averages.values()), list(self._weights.values())
            torch._foreach_lerp_(averages, weights, share)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights, for an evaluation; the weights themselves are back afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # By content: compiled code and optimizers hold on to the tensors.
        for name, weight in self._weights.items():
            held = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(held)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by their parameters' names."""
        return dict(self._averages)
