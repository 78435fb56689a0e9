"""Generation on a GPU: a step of decoding recorded as a CUDA graph.

A token of a 124M model is some 200 kernels of a few microseconds each, which take Python and torch several times as
long to launch. A recorded step reads the same memory each time, so the slot that it writes is a number on the device.

`torch.cuda.graph` is not used: it waits for the device and empties the allocator first, while a recording is made here
for every batch of prompts, also in the middle of training.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from ingot.infer.ops import TorchOps


class CUDAOps(TorchOps):
    """PyTorch's operations, whose steps are recorded and replayed."""

    records = True

    def record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        return RecordedStep(step, inputs)


class RecordedStep:
    """A function of tensors as a CUDA graph.

    Args:
        step: reads no number from the device. It ran once before, which prepared its kernels.
        inputs: tensors like those of every later call.

    Raises:
        RuntimeError: `step` cannot be recorded.
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
        """The step for other inputs; the next call overwrites the result."""
        for recorded, new in zip(self._inputs, inputs, strict=True):
            recorded.copy_(new)
        self._graph.replay()
        return self._out


@cache
def _side_stream() -> torch.cuda.Stream:
    """The stream of all recordings: cuBLAS keeps some 30 MB for every stream that it has ever used."""
    return torch.cuda.Stream()
