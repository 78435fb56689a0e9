"""The process group of a stage's ranks: joined before the stage is built, left after it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import UserError
from ingot.core.heartbeat import write_heartbeat
from ingot.core.ranks import STORE, Rank, forget_failure, heartbeat_file, own_rank


@contextlib.contextmanager
def joined(stage: Path, device: str) -> Iterator[Rank]:
    """Context in which the ranks of a stage are one process group; a process alone joins nothing and imports nothing.

    Args:
        stage: directory of the stage, where the rank shows what it is doing.
        device: the setting `loop.device`.

    Raises:
        UserError: this machine has more ranks than GPUs.
    """
    rank = own_rank()
    if rank.size == 1:
        yield rank
        return
    import torch
    import torch.distributed as td

    forget_failure(stage)
    write_heartbeat(heartbeat_file(stage, rank.number))
    store = os.environ.get(STORE)
    options: dict[str, Any] = {"init_method": f"file://{store}"} if store else {}
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        own, gpus = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
        if own == gpus:  # one message; the ranks after this one wait for it
            raise UserError(
                f"found {gpus:,} GPU{'s' if gpus > 1 else ''} for more ranks on this machine, expected one for each; "
                'start fewer, or set loop.device = "cpu"'
            )
        torch.cuda.set_device(own % gpus)
    td.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank.number, world_size=rank.size, **options)
    yield rank
    td.destroy_process_group()  # not after an error: the other ranks may be gone


def agreed(decide: Callable[[], bool]) -> bool:
    """What `decide` returns on the first rank, which alone calls it."""
    if own_rank().size == 1:
        return decide()
    from ingot.distributed.mesh import current

    return current().first(decide)


def meet() -> None:
    """Wait until every rank is here."""
    if own_rank().size > 1:
        from ingot.distributed.mesh import current

        current().wait()


def lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has ended."""
    if own_rank().size == 1:
        return False
    import torch.distributed as td

    text = str(error)
    return isinstance(error, td.DistError) or "gloo/transport" in text or "Connection closed by peer" in text
