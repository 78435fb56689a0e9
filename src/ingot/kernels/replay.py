"""A step of decoding as a list of calls, made again by one.

A step calls the same functions with the same arguments as the step before it: only the numbers in memory change. What
Python and torch do around the calls takes longer than a small model's step itself, so the calls of a first step are
written down, and from then on our library makes them, one after another. The forward of decoding stays the one place
that says what they are. CUDA graphs are recorded in the same way.

While it is recorded a step writes into memory that stays: one tensor for all outputs of a name, shape and dtype, since
of those one is in use at a time. A step that anything else takes part in (torch's operations, as a LayerNorm of heads
or oneDNN's products are) cannot be made again so; recording notices.

Rejected: the step as one function (the architecture written twice), and a tensor for each output (the outputs of all
layers do not fit the cache that those of one layer do).
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Word = ctypes.c_int64
"""Of a list of arguments: a pointer or a number."""


class Tape:
    """Calls of our own functions, in order.

    Args:
        play: the library's function that makes them again.
        inputs: what they read that differs from time to time.
    """

    def __init__(self, play: Any, inputs: Sequence[Tensor | None]):
        self.play, self.inputs, self.calls, self.words = play, inputs, 0, list[int]()
        self.rooms: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self.whole = False
        """It has ended, and nothing but these calls computed."""
        self.others = False

    def add(self, function: int, words: ctypes.Array[Any]) -> None:
        """Write down a call: where the function is, and its arguments."""
        self.calls += 1
        self.words += [function, len(words), *words]

    def again(self, *inputs: Tensor | None) -> None:
        """Make the calls with other inputs; what they give is where it was when they were recorded."""
        for kept, new in zip(self.inputs, inputs, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)
        self.play(self._packed, self.calls)

    def end(self) -> None:
        """Nothing is added from now on."""
        self.whole = not self.others
        if self.others:
            self.inputs, self.words = (), []
            self.rooms.clear()
        self._packed = (Word * len(self.words))(*self.words)


_recorded: ContextVar[Tape | None] = ContextVar("recorded", default=None)


@contextmanager
def record(play: Any, inputs: Sequence[Tensor | None]) -> Iterator[Tape]:
    """Write down what is called meanwhile, in this thread."""
    tape = Tape(play, inputs)
    token = _recorded.set(tape)
    try:
        with _Watch(tape):
            yield tape
    finally:
        _recorded.reset(token)
    tape.end()


def call(function: Any, *words: int) -> None:
    """Call one of our functions, and write it down where that is asked for."""
    packed = (Word * len(words))(*words)
    function(packed)
    if (tape := _recorded.get()) is not None:
        tape.add(ctypes.cast(function, ctypes.c_void_p).value or 0, packed)


def room(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for what a function gives: new, or while calls are written down the same for all of that name and kind."""
    if (tape := _recorded.get()) is None:
        return torch.empty(shape, dtype=dtype)
    key = (name, shape, dtype)
    if key not in tape.rooms:
        tape.rooms[key] = torch.empty(shape, dtype=dtype)
    return tape.rooms[key]


class _Watch(TorchDispatchMode):
    """Sees every operation of torch's. A tape is whole if all of them were views or new, empty memory. What calls
    itself a view may be a copy (`to`, `contiguous`), so its memory is compared with its arguments'."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and to see to that torch imports its compiler, a second and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = func is torch.ops.aten.empty.memory_format
        self.tape.others |= not new and not (func.is_view and _memory(out) in map(_memory, args))
        return out


def _memory(tensor: Any) -> int | None:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else None
