"""Notices bits that flip in the memory of weights, moments and averages.

Between two updates nothing changes them. So the bits of each tensor are read as integers and summed after an update,
and again before the next one, behind its backward pass. A flipped bit changes the sum by a power of two below 2^64,
the modulus, so a single one is always noticed. The sums stay on the device, which is not waited for.

Not noticed: a bit that flips while an update or a sum is computed, or in what lives for one step only, such as
gradients; a cell that is stuck, because both sums read the same; two flips of one bit of a word in one tensor, in
opposite directions, between the same updates.

A check takes two passes over weights and moments, about 1 % of the time of `TOKENS_APART` tokens, so it is made once in
so many. Larger steps are all checked. A recorded update (`backends/cuda_graphs.py`) is replayed without a check, so one
in `RECORDED_STEPS` is computed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.distributed.sharding import local_tensor

TOKENS_APART = {"cpu": 1 << 12, "cuda": 1 << 16}
"""Tokens of a rank from one check to the next. With P parameters in fp32, T tokens take 6 P T operations and a check
reads 24 P bytes. Measured on a CPU; computed for a GPU with 400 TFLOP/s and 2.5 TB/s."""
RECORDED_STEPS = 100
MAX_RELOADS = 5
"""Times that a run goes back to one checkpoint because of flipped bits, before it ends."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Check(NamedTuple):
    """A comparison that is still on the device."""

    names: list[str]
    changed: Tensor
    """Whether each tensor has changed, (names,) boolean."""

    def flipped(self) -> str | None:
        """The name of the first tensor that has changed. Waits for the device."""
        return next((name for name, changed in zip(self.names, self.changed.tolist(), strict=True) if changed), None)


class BitSums:
    """The sums of the bits of some tensors.

    Args:
        tensors: returns them by name; called at the first `record`.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]):
        self._tensors, self._integers, self._names = tensors, [], []
        self._sums: Tensor | None = None

    def record(self) -> None:
        """Take the present values for the right ones."""
        if not self._names:
            tensors = {name: as_integers(tensor) for name, tensor in self._tensors().items() if tensor.numel()}
            self._names, self._integers = list(tensors), list(tensors.values())
        if self._names:
            self._sums = self._now()

    @property
    def recorded(self) -> bool:
        return self._sums is not None

    def forget(self) -> None:
        """Compare nothing until the next `record`."""
        self._sums = None

    def checks(self) -> list[Check]:
        """A comparison with the values at the last `record`; empty if there is none."""
        return [] if self._sums is None else [Check(self._names, self._now() != self._sums)]

    def _now(self) -> Tensor:
        return torch.stack([integers.sum() for integers in self._integers])


class BitFlips:
    """Checks what is trained before updates, and that and what is frozen on demand.

    Args:
        active: whether anything is checked.
        updated: returns what an update changes.
        averages: returns what a step changes after its updates.
        frozen: returns what nothing changes.
        tokens: tokens from one checked step to the next, at least; 0 checks all.
    """

    steps_apart = 1
    """Steps from one that is checked to the next, at least."""

    def __init__(
        self,
        active: bool,
        updated: Callable[[], Mapping[str, Tensor]],
        averages: Callable[[], Mapping[str, Tensor]],
        frozen: Callable[[], Mapping[str, Tensor]],
        tokens: int = 0,
    ):
        self._active, self._tokens_apart = active, tokens
        self._updated, self._averages, self._frozen = BitSums(updated), BitSums(averages), BitSums(frozen)
        self._checks: list[Check] = []
        self._first, self._due = True, active
        self._steps = self._tokens = 0  # since the last step that was due
        self.reloads: list[int] = []
        """The steps of the checkpoints to which the run went back because of flipped bits."""

    @property
    def watching(self) -> bool:
        """Whether the next update is checked."""
        return self._updated.recorded

    def begin(self, step: int) -> None:
        """Before a step."""
        if self._first and self._active:
            if not self._frozen.recorded:
                self._frozen.record()
            if step > 1:  # else an optimizer may not have its state yet
                self._updated.record()
                self._averages.record()
        self._first, self._checks = False, []

    def before_update(self) -> None:
        """Before the first change of an update, behind its backward pass."""
        self._checks += self._updated.checks()

    def after_update(self) -> None:
        self._updated.record() if self._due else self._updated.forget()

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Context in which the averages are updated."""
        self._checks += self._averages.checks()
        yield
        self._averages.record() if self._due else self._averages.forget()

    def end(self, tokens: int) -> list[Check]:
        """After a step.

        Args:
            tokens: of this rank.

        Returns:
            The checks that were made in it.
        """
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        self._due = self._active and self._steps >= self.steps_apart and self._tokens >= self._tokens_apart
        if self._due:
            self._steps = self._tokens = 0
        return self._checks

    def forget(self) -> None:
        """Compare nothing until the next step, because other values were loaded."""
        self._first, self._due = True, self._active
        self._updated.forget()
        self._averages.forget()

    def now(self) -> tuple[str | None, str | None]:
        """The first tensor that has changed since the last update, and the first frozen one. Waits for the device."""
        trained = (check.flipped() for sums in (self._updated, self._averages) for check in sums.checks())
        frozen = (check.flipped() for check in self._frozen.checks())
        return next(filter(None, trained), None), next(filter(None, frozen), None)


def as_integers(tensor: Tensor) -> Tensor:
    """The memory of a tensor as integers, as wide as its size and place allow."""
    tensor = local_tensor(tensor.detach())
    in_memory = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # a transposed tensor is not contiguous
    tensor = tensor.permute(in_memory).view(-1)
    size = tensor.numel() * tensor.element_size()
    width = next(w for w in _INTEGERS if size % w == 0 and tensor.data_ptr() % w == 0)
    return tensor.view(_INTEGERS[width])
