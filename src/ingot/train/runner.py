"""Forward and backward passes over the micro-batches of a batch, on one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.train.execution import Execution


class Runner:
    """Cuts batches into micro-batches of the size that the execution chose, and runs models over them."""

    def __init__(self, execution: Execution):
        self.execution = execution

    def forward(self, model: nn.Module, rows: Batch, taps: frozenset[str] = frozenset()) -> Any:
        """The model's output for rows that are on the device, in the precision of the run."""
        with self.execution.forward():
            return model(**rows.inputs, taps=taps) if taps else model(**rows.inputs)

    def learn(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Callable[[Any, Batch], Tensor],
        taps: Callable[[Batch], frozenset[str]],
        seed: Callable[[int], int],
    ) -> None:
        """Add the gradients of all rows to `.grad`.

        Args:
            loss: (output, rows) -> the loss to differentiate.
            taps: of some rows.
            seed: micro-batch -> what dropout is seeded with.
        """
        for number, micro in enumerate(batch.micro(self.execution.rows(batch.context))):
            self.execution.seed(seed(number))
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                value = loss(self.forward(model, rows, taps(rows)), rows)
            value.backward()

    @torch.no_grad()
    def read(
        self,
        model: nn.Module,
        batch: Batch,
        read: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor:
        """`read(output, rows)` for all rows, rows first. No gradients."""
        parts = []
        for micro in batch.micro(self.execution.rows(batch.context)):
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                parts.append(read(self.forward(model, rows, taps), rows))
        return torch.cat(parts)
