"""Training updates as CUDA graphs.

For small models, launching kernels takes longer than running them. So after a few updates of one shape, the next one is
recorded, from the forward pass to the optimizer, and replayed from then on: the batch and the learning rate are copied
to the recorded inputs, and loss and gradient norm from the recorded outputs. The kernels and the results are the same.

A recorded update must not read numbers from the device, and may depend on the tensors of a batch only. This holds for
objectives that declare it (`Needs.capturable`), full rows and no dropout. It also needs memory for a second set of
activations, because a graph has its own.

(torch.compile's "reduce-overhead" captures forward and backward pass, but not head, clipping and optimizer.)
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ingot.data.batches import Batch

WARMUP_UPDATES = 3
"""Updates of a shape before it is recorded, in which everything is compiled and planned."""
MAX_MEMORY_FRACTION = 0.25
"""An update is recorded only if it takes at most this fraction of the GPU's memory."""

UpdateResult = tuple[Tensor, dict[str, Tensor], Tensor, Tensor]
"""Loss, penalties and metrics by name, gradient norm, whether the update was skipped."""
UpdateFunction = Callable[[Batch, Mapping[str, int], float | Tensor, int], UpdateResult]
"""(batch, its counts, learning rate, number of the update within the step) -> result of the update."""


class Recorder:
    """Records and replays the updates of one shape of batches, the first one that repeats."""

    def __init__(self, update: UpdateFunction):
        self._update = update
        self._seen: Counter[Any] = Counter()
        self._recording: tuple[Any, _Recording] | None = None
        self._failed = False

    def __call__(self, batch: Batch, counts: Mapping[str, int], lr: float) -> UpdateResult | None:
        """The result of the replayed update; None if the caller has to run the update."""
        key = (len(batch), batch.context, batch.documents_BT is None, *batch.columns, *counts.items())
        if self._recording is None and not self._failed and self._should_record(key, batch, counts):
            try:
                self._recording = key, _Recording(self._update, batch, counts, lr)
            except RuntimeError as error:  # recording computes nothing, so the update still has to run
                self._failed = True
                warnings.warn(
                    f"training without CUDA graphs, because recording an update failed: {error}", stacklevel=2
                )
        if self._recording is None or self._recording[0] != key:
            return None
        return self._recording[1](batch, lr)

    def _should_record(self, key: Any, batch: Batch, counts: Mapping[str, int]) -> bool:
        self._seen[key] += 1
        full = counts["token"] == batch.labels_BT.size and batch.replay is None
        if self._seen[key] <= WARMUP_UPDATES or not full or any(array.dtype == object for array in batch.arrays()):
            return False
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return torch.cuda.max_memory_allocated() < MAX_MEMORY_FRACTION * total


class _Recording:
    """A captured update, with its input and output tensors."""

    def __init__(self, update: UpdateFunction, batch: Batch, counts: Mapping[str, int], lr: float):
        self._batch = batch.to("cuda")
        self._lr = torch.tensor(lr, dtype=torch.float32, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory of earlier updates
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._out = update(self._batch, counts, self._lr, 0)

    def __call__(self, batch: Batch, lr: float) -> UpdateResult:
        for recorded, new in zip(self._batch.arrays(), batch.to("cuda").arrays(), strict=True):
            recorded.copy_(new, non_blocking=True)
        self._lr.fill_(lr)
        self._graph.replay()
        loss, others, norm, skipped = self._out
        return loss.clone(), {name: value.clone() for name, value in others.items()}, norm.clone(), skipped.clone()
