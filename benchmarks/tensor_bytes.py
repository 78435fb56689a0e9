"""Bytes of the tensors that exist while a function runs, counted as PyTorch creates and frees them.

Unlike the memory of a process this is the same number on every run and every machine. Temporary buffers inside a kernel
are not tensors and are not counted.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Context that counts the storages created in it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in before | self._seen:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
