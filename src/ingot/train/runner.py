"""Forward and backward passes over the micro-batches of a batch, on one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.train.execution import Execution


class Runner:
    """Splits batches into micro-batches of the execution's size and runs models over them."""

    def __init__(self, execution: Execution):
        self.execution = execution

    def forward(self, model: nn.Module, rows: Batch, taps: frozenset[str] = frozenset()) -> Any:
        """The model's output for rows on the device, in the precision of the run."""
        with self.execution.forward():
            return model(**rows.inputs, taps=taps) if taps else model(**rows.inputs)

    def backward(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Callable[[Any, Batch], Tensor],
        taps: Callable[[Batch], frozenset[str]],
        seed: Callable[[int], int],
    ) -> None:
        """Accumulate the gradients of all rows in `.grad`.

        Args:
            loss: (output, rows) to the scalar to differentiate.
            taps: rows to the taps that their loss needs.
            seed: number of the micro-batch to the seed of its dropout.
        """
        for number, micro in enumerate(batch.micro_batches(self.execution.rows(batch.context))):
            self.execution.seed(seed(number))
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                value = loss(self.forward(model, rows, taps(rows)), rows)
            value.backward()

    @torch.no_grad()
    def run(
        self,
        model: nn.Module,
        batch: Batch,
        function: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor:
        """`function(output, rows)` of all micro-batches, concatenated along the rows. No gradients."""
        outputs = []
        for micro in batch.micro_batches(self.execution.rows(batch.context)):
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                outputs.append(function(self.forward(model, rows, taps), rows))
        return torch.cat(outputs)
