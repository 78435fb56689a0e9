"""Forward and backward passes over the micro-batches of a batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.batches import Batch, share
from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import last_micro_batch, whole
from ingot.train.execution import Execution

T = TypeVar("T")


class Runner:
    """Splits batches of this rank's rows into micro-batches of the execution's size and runs models over them."""

    def __init__(self, execution: Execution, mesh: Mesh = Mesh()):  # noqa: B008 - immutable
        self.execution, self.mesh = execution, mesh

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
        micro_batches = self._micro_batches(batch)
        for number, micro in enumerate(micro_batches):
            self.execution.seed(seed(number))
            last_micro_batch(model, self.mesh, number == len(micro_batches) - 1)
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
        for micro in self._micro_batches(batch):
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                outputs.append(function(self.forward(model, rows, taps), rows))
        return torch.cat(outputs)[: len(batch)]

    def map(self, function: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]) -> list[T]:
        """`function(items)`, which returns one result an item."""
        return list(function(items))

    def once(self, function: Callable[[], T]) -> T:
        """`function()`."""
        return function()

    def readable(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which a model has all of its weights on this rank."""
        return whole(model)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """The micro-batches; with shards equally many on all ranks, because ranks gather weights together in each pass.

        The last one is repeated without labels where rows of other ranks are longer, so that theirs are more.
        """
        micro_batches = list(batch.micro_batches(self.execution.rows(batch.context)))
        if self.mesh.shard > 1:
            most = int(self.mesh.max(torch.tensor(len(micro_batches))))
            empty = micro_batches[-1].without_labels(np.ones(len(micro_batches[-1]), bool))
            micro_batches += [empty] * (most - len(micro_batches))
        return micro_batches


class Dealer(Runner):
    """A runner for batches that all ranks have alike: each computes its share, and all get the results of all rows."""

    def run(
        self,
        model: nn.Module,
        batch: Batch,
        function: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor:
        """`function(output, rows)` of all rows of the batch, in their order. No gradients."""
        own = batch.share(self.mesh.rank, self.mesh.size)
        return self.mesh.rows(super().run(model, own, function, taps))[: len(batch)]

    def map(self, function: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]) -> list[T]:
        """`function` of all items, of which each rank computes equally many, so that it may use shards."""
        own = function([items[i] for i in share(len(items), self.mesh.rank, self.mesh.size)[0]])
        return [result for results in self.mesh.objects(list(own)) for result in results][: len(items)]

    def once(self, function: Callable[[], T]) -> T:
        """`function()` of the first rank."""
        return self.mesh.first(function)
