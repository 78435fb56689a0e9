"""The ranks of a run. The rest of the house knows `rank`, `sum` and `max`; with one rank they are the identity.

There is no `if distributed` anywhere: a single process is the mesh of size one.
"""

from dataclasses import dataclass

import torch.distributed as td
from torch import Tensor


@dataclass(frozen=True)
class Mesh:
    """All ranks of the default process group, or one rank where there is none."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """The largest value over all ranks, in place."""
        return self._reduce(tensor, "MAX")

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        if self.size > 1:
            td.all_reduce(tensor, op=getattr(td.ReduceOp, how))
        return tensor


def current() -> Mesh:
    """The mesh this process is part of."""
    if td.is_available() and td.is_initialized():
        return Mesh(td.get_rank(), td.get_world_size())
    return Mesh()
