"""An update recorded as a CUDA graph: the GPU runs a step's kernels one after another without being told each.

Telling it costs more than running them where a model is small. So after a few plain updates of one shape the next one
is recorded, from the forward pass to the optimizer, and from then on replayed: the batch and the learning rate are
copied to where the recording reads them, and its loss and norm from where it leaves them. The kernels are the same, so
are the numbers.

What is recorded may not ask the device for a number nor depend on more of a batch than its tensors. Only objectives
that promise this (`recordable`) are, with full rows, without dropout, and where memory allows a second set of
activations, which a recording keeps to itself.

Rejected: torch.compile's "reduce-overhead", which records forward and backward pass but neither head, clipping nor
optimizer.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ingot.data.batches import Batch

WARM = 3
"""Plain updates of a shape before it is recorded: by then everything is compiled and planned."""
MOST = 0.25
"""Share of the GPU's memory that a plain update may take where another is recorded beside it."""

Learned = tuple[Tensor, dict[str, Tensor], Tensor, bool]
"""Loss, other numbers by name, gradient norm, and whether the update was skipped."""
Learn = Callable[[Batch, Mapping[str, int], float | Tensor, int], Learned]
"""(batch, its counts, learning rate, update within the step) -> an update made."""


class Recorder:
    """Replays updates of the one shape that comes again and again."""

    def __init__(self, learn: Learn):
        self._learn = learn
        self._seen: Counter[Any] = Counter()
        self._recording: tuple[Any, _Recording] | None = None
        self._gave_up = False

    def __call__(self, batch: Batch, counts: Mapping[str, int], lr: float) -> Learned | None:
        """The update, or None where it must be made plainly."""
        key = (len(batch), batch.context, batch.documents_BT is None, *batch.columns, *counts.items())
        if self._recording is None and not self._gave_up and self._ripe(key, batch, counts):
            try:
                self._recording = key, _Recording(self._learn, batch, counts, lr)
            except RuntimeError as error:  # nothing has been computed yet, so the update is still to be made
                self._gave_up = True
                warnings.warn(f"updates are not replayed, since recording one failed: {error}", stacklevel=2)
        if self._recording is None or self._recording[0] != key:
            return None
        return self._recording[1](batch, lr)

    def _ripe(self, key: Any, batch: Batch, counts: Mapping[str, int]) -> bool:
        self._seen[key] += 1
        full = counts["token"] == batch.labels_BT.size and batch.replay is None
        if self._seen[key] <= WARM or not full or any(array.dtype == object for array in batch.arrays()):
            return False
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return torch.cuda.max_memory_allocated() < MOST * total


class _Recording:
    """One update, and the tensors it reads and writes."""

    def __init__(self, learn: Learn, batch: Batch, counts: Mapping[str, int], lr: float):
        self._batch = batch.to("cuda")
        self._lr = torch.tensor(lr, dtype=torch.float32, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the plain updates held
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._out = learn(self._batch, counts, self._lr, 0)

    def __call__(self, batch: Batch, lr: float) -> Learned:
        for held, new in zip(self._batch.arrays(), batch.to("cuda").arrays(), strict=True):
            held.copy_(new, non_blocking=True)
        self._lr.fill_(lr)
        self._graph.replay()
        loss, others, norm, skipped = self._out
        return loss.clone(), {name: value.clone() for name, value in others.items()}, norm.clone(), skipped
