"""The contract between whoever starts the ranks of a stage and the ranks: environment variables, files, an exit code.

`RANK`, `WORLD_SIZE` and `LOCAL_RANK` are torchrun's. No torch, because the supervisor uses it.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

STORE = "INGOT_STORE"
"""Environment variable: a file through which the ranks of this machine meet; without it, torchrun's address."""
LOST_PEER = 75
"""Exit code of a rank that ended because another one did (EX_TEMPFAIL)."""
RANKS = "ranks"
"""Directory of the ranks' logs and heartbeats in a stage's directory."""


class Rank(NamedTuple):
    """This process among the ranks of a stage."""

    number: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether it writes the stage's log and result and speaks to the user."""
        return self.number == 0


def own_rank() -> Rank:
    """The rank of this process, from its environment; the only one if nothing is set."""
    return Rank(int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1))


class RankFailure(NamedTuple):
    """A rank that failed by itself, and why."""

    rank: int
    why: str


def heartbeat_file(stage: Path, rank: int) -> Path:
    """What a rank of a stage is doing."""
    return stage / RANKS / f".{rank}.beat.tmp"


def log_file(stage: Path, rank: int) -> Path:
    """The log of a rank other than the first."""
    return stage / RANKS / f"{rank}.jsonl"


def _failure_file(stage: Path) -> Path:
    """The first failure of this attempt."""
    return stage / RANKS / ".failure.tmp"


def forget_failure(stage: Path) -> None:
    """Remove the failure of an earlier attempt; ranks call it before they meet, and fail after that."""
    _failure_file(stage).unlink(missing_ok=True)


def record_failure(stage: Path, failure: RankFailure) -> None:
    """Record why a rank failed, unless another one has failed before."""
    with contextlib.suppress(OSError), _failure_file(stage).open("x") as file:  # a full disk may be the failure
        file.write(json.dumps(failure))


def first_failure(stage: Path) -> RankFailure | None:
    """The rank that failed first in this attempt; None if none has recorded a failure."""
    try:
        return RankFailure(*json.loads(_failure_file(stage).read_text()))
    except (OSError, ValueError, TypeError):
        return None
