"""Partitions on Ray: the cluster that RAY_ADDRESS names, or processes of this machine without it.

Every node must see the sources and the directory of the run under the same path, as a file system of a cluster does.
A partition whose worker or node is lost is given to another one.
"""

import logging
import os
from collections.abc import Iterator, Sequence

from ingot.core.errors import UserError
from ingot.corpus.partitions import Partition
from ingot.corpus.runners import LOST_WORKER
from ingot.corpus.spool import Work, process

IN_FLIGHT = 4
"""Partitions that wait, for each core of the cluster."""


def run(work: Work, partitions: Sequence[Partition], workers: int) -> Iterator[tuple[int, str]]:
    """Process partitions; as `runners` says. `workers` counts without a cluster.

    Raises:
        UserError: the cluster does not answer, or workers are lost again and again.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when ray starts
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray.exceptions  # pyright: ignore[reportMissingImports]

    environment = {"env_vars": {"POLARS_MAX_THREADS": "1", "DO_NOT_TRACK": "true"}}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": environment}
    try:
        if "RAY_ADDRESS" in os.environ:
            ray.init(**quiet)
        else:
            ray.init(num_cpus=workers, include_dashboard=False, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        address = os.environ.get("RAY_ADDRESS", "this machine")
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"runner: Ray did not start at {address} ({reason}); check RAY_ADDRESS, or start it with `ray start`"
        ) from None
    try:
        task = ray.remote(process).options(max_retries=3, num_cpus=1)
        waiting, numbers = list(partitions)[::-1], {}
        most = IN_FLIGHT * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting or numbers:
            while waiting and len(numbers) < most:
                partition = waiting.pop()
                numbers[task.remote(work, partition)] = partition.number
            (done, *_), _ = ray.wait(list(numbers))
            yield numbers.pop(done), ray.get(done)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError):
        raise UserError(LOST_WORKER) from None
    finally:
        ray.shutdown()
