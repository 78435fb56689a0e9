"""Runs a function on several ranks: forked processes in one gloo group, after everything was imported once."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as td

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
