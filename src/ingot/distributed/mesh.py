"""The ranks of a run as a grid: `replicate` groups, each of which holds the model in `shard` parts.

Other packages use `rank`, `sum`, `rows` and so on, which do nothing with one rank. A single process is a mesh of size
one, so no other code needs an `if distributed`.

Every rank calls the collectives in the same order. What a rank decides by its own clock, files or measurements is
therefore decided by the first rank and passed on (`first`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as td
from torch import Tensor

from ingot.core.heartbeat import HEARTBEAT, WAITING

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """All ranks of the default process group, or one rank without one."""

    rank: int = 0
    size: int = 1
    shard: int = 1
    """Ranks that hold the parts of one model. All ranks train on different rows."""
    zero: int = 3
    """With shards: 3 gathers weights for each block and drops them; 2 keeps them from the forward to the backward pass;
    1 also keeps whole gradients until the last micro-batch."""
    device: str = field(default="cpu", compare=False)
    gathered: torch.dtype | None = None
    """With shards: the number format in which weights of blocks are sent, that of the products; None: as stored."""

    @property
    def replicate(self) -> int:
        """Groups that hold the model once each."""
        return self.size // self.shard

    @property
    def leads(self) -> bool:
        """Whether this rank writes logs and results and speaks to the user."""
        return self.rank == 0

    @cached_property
    def grid(self) -> Any:
        """torch's DeviceMesh (replicate, shard), for what is sharded."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, in place."""
        return self._reduce(tensor, "MAX")

    def sum_of_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the parts of one model, in place."""
        if self.shard > 1:
            with HEARTBEAT.during(WAITING):
                td.all_reduce(tensor, group=self.grid["shard"].get_group())
        return tensor

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks, in the order of ranks; each rank has equally many."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with HEARTBEAT.during(WAITING):
            td.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def objects(self, value: T) -> list[T]:
        """The values of all ranks (picklable), in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with HEARTBEAT.during(WAITING):
            td.all_gather_object(values, value)
        return values

    def first(self, choose: Callable[[], T]) -> T:
        """What `choose` returns on the first rank, which alone calls it."""
        if self.size == 1:
            return choose()
        values = [choose() if self.leads else None]
        with HEARTBEAT.during(WAITING):
            td.broadcast_object_list(values, src=0)
        return values[0]  # pyright: ignore[reportReturnType]

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with HEARTBEAT.during(WAITING):
                td.barrier()

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether it is set on some rank."""
        if self.size == 1:
            return flags
        return tuple(bool(n) for n in self.max(torch.tensor([int(flag) for flag in flags])))

    def _reduce(self, tensor: Tensor, op: str) -> Tensor:
        if self.size > 1:
            with HEARTBEAT.during(WAITING):
                td.all_reduce(tensor, op=getattr(td.ReduceOp, op))
        return tensor


def current(shard: int = 1, zero: int = 3, device: str = "cpu") -> Mesh:
    """The mesh of this process, in groups of `shard` ranks."""
    if td.is_available() and td.is_initialized():
        return Mesh(td.get_rank(), td.get_world_size(), shard, zero, device.partition(":")[0])
    return Mesh()
