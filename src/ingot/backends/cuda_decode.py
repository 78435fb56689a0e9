"""Generation on a GPU with CUDA graphs.

A decoding step of a 124M model has about 200 kernels of a few microseconds, and launching them takes several times as
long. Replaying a recorded step avoids the launches. A recorded step always reads the same memory, so the index of the
slot that it writes is on the device.

`torch.cuda.graph` is not used because it synchronises the device and empties the allocator's cache before each capture,
and a step is recorded for every batch of prompts, also during training.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from ingot.infer.ops import TorchOps


class CUDAOps(TorchOps):
    """PyTorch's operations, with steps recorded as CUDA graphs."""

    records = True

    def record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        return RecordedStep(step, inputs)


class RecordedStep:
    """A function of tensors as a CUDA graph.

    Args:
        step: must not read numbers from the device, and has run once before, which prepared its kernels.
        inputs: tensors of the shapes of every later call.

    Raises:
        RuntimeError: `step` cannot be captured.
    """

    def __init__(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]):
        self._inputs = [x.clone() for x in inputs]
        self._graph = torch.cuda.CUDAGraph()
        side, current = _side_stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._out = step(*self._inputs)
            except BaseException:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        current.wait_stream(side)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Replay the step with these inputs; the next call overwrites the result."""
        for recorded, new in zip(self._inputs, inputs, strict=True):
            recorded.copy_(new)
        self._graph.replay()
        return self._out


@cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS allocates about 30 MB for every stream."""
    return torch.cuda.Stream()
