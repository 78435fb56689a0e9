"""Runs a function on several ranks: forked processes in one gloo group, after everything was imported once; and what
they allocate."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DONE = 0


def on_ranks(size: int, function: Callable[[int], None]) -> None:
    """Call `function(rank)` in `size` processes of one group.

    Raises:
        AssertionError: one of them raised; its traceback is on standard error.
    """
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(size):
            if (pid := os.fork()) == 0:
                os._exit(_rank(rank, size, Path(directory) / "store", function))
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [DONE] * size, codes


def _rank(rank: int, size: int, store: Path, function: Callable[[int], None]) -> int:
    try:
        torch.set_num_threads(1)
        td.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        function(rank)
        td.barrier()
        td.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return DONE


class Peak(TorchDispatchMode):
    """The largest sum of the sizes of all storages alive after an operation, without views counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten((args, out))[0]:
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "placements") and not tensor.is_meta:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference
        self.alive = {data: ref for data, ref in self.alive.items() if not ref.expired()}
        self.bytes = max(self.bytes, self.now())
        return out

    def now(self) -> int:
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.alive.values())
        return sum(storage.nbytes() for storage in storages if storage is not None)
