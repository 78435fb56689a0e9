"""The ranks of a run. Other packages use `rank`, `sum` and `max`, which are the identity with one rank.

A single process is a mesh of size one, so no other code needs an `if distributed`.
"""

from dataclasses import dataclass

import torch.distributed as td
from torch import Tensor


@dataclass(frozen=True)
class Mesh:
    """All ranks of the default process group, or one rank without one."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, in place."""
        return self._reduce(tensor, "MAX")

    def _reduce(self, tensor: Tensor, op: str) -> Tensor:
        if self.size > 1:
            td.all_reduce(tensor, op=getattr(td.ReduceOp, op))
        return tensor


def current() -> Mesh:
    """The mesh of this process."""
    if td.is_available() and td.is_initialized():
        return Mesh(td.get_rank(), td.get_world_size())
    return Mesh()
