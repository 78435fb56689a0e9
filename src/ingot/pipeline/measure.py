"""`ingot plan --measure`: measures the train stages of a recipe on this machine, each in a process of its own.

No data is needed: a stage's engine trains on random ids (`stages/training/measure.py`). The result is kept in the cache
for this and later plans.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.core.errors import StageFailed, UserError
from ingot.core.process import available_memory
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph
from ingot.pipeline.run import child_environment, processes
from ingot.pipeline.status import status
from ingot.plan.cost import Speed
from ingot.plan.machine import GIGA, Device
from ingot.stages.training.calibration import read_speed, workload, write_speed
from ingot.stages.training.costs import costs, rows_that_fit
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.plan_inputs import forecast_inputs
from ingot.stages.training.settings import TrainSettings

SPARE = 0.9
"""Fraction of the free main memory that a measurement may take."""
OVERHEAD = GIGA // 2
"""Bytes of a process with torch, before it has a tensor."""

Notify = Callable[[str], None]


def measure_all(graph: Graph, device: Device, ranks: int | None, only: list[str], notify: Notify) -> None:
    """Measure the train stages that `run` would run and whose speed is not known.

    Args:
        device: this machine's.
        ranks: processes of a stage, as for `run`.
        only: as for `run`.
        notify: receives a line for each stage that is measured, and for each that cannot be.

    Raises:
        StageFailed: a measurement ended with an error, which it has printed.
    """
    for node in graph.needed(only):
        if not isinstance(node.settings, TrainSettings) or status(graph, node).state == "HIT":
            continue
        try:
            inputs = forecast_inputs(node, graph.stage, device, processes(node, ranks), here=True)
            measure_stage(node.settings, inputs, graph.root, lambda text, node=node: notify(f"{node.name}: {text}"))
        except UserError as error:
            notify(f"{node.name}: not measured, because {error}")


def measure_stage(
    settings: TrainSettings, inputs: ForecastInputs, root: Path, notify: Notify, again: bool = False
) -> dict[str, Any] | None:
    """Measure a stage, and keep its speed.

    Args:
        root: output root; checkpoints are written to its disk.
        again: also if its speed is known.

    Returns:
        The measurement (`stages/training/measure.py: Measurement`); None if the speed is known.

    Raises:
        UserError: only a run can show its speed, or its memory does not suffice.
        StageFailed: the measurement ended with an error.
    """
    figures = forecast(settings, inputs)
    if "unknown" in figures:
        raise UserError(figures["unknown"])
    if why := why_not(settings, inputs):
        raise UserError(why)
    work = workload(settings, inputs, figures)
    if not again and read_speed(work):
        return None
    job = measure_job(settings, inputs, figures, root)
    notify("measuring")
    found = _child(job, settings)
    write_speed(work, Speed(**found["speed"]), by="a measurement", **{n: v for n, v in found.items() if n != "speed"})
    if found["rows"] < figures["batch"]["micro_batch"]:
        notify(f"measured with {found['rows']:,} of {figures['batch']['micro_batch']:,} rows of a micro-batch")
    return found


def why_not(settings: TrainSettings, inputs: ForecastInputs) -> str | None:
    """Why only a run can show the speed of a stage; None if a measurement can."""
    if settings.objective.kind != "lm":
        return f"objective {settings.objective.kind} is measured while it runs; the first run keeps its speed"
    if settings.penalties or inputs.companions:
        return "penalties and companions are measured while they run; the first run keeps its speed"
    if inputs.ranks > 1:
        return "several processes are measured while they run; the first run keeps its speed"
    return None


def measure_job(
    settings: TrainSettings, inputs: ForecastInputs, figures: Mapping[str, Any], root: Path
) -> dict[str, Any]:
    """The job of a measurement. A CPU measures no more rows than its free memory has room for.

    Raises:
        UserError: there is no room for a row.
    """
    batch = figures["batch"]
    rows, largest, free = batch["micro_batch"], costs(settings, inputs, figures)["fits"] or 0, available_memory()
    if not inputs.device.is_gpu:
        rows, largest = rows_that_fit(settings, inputs, SPARE * free - OVERHEAD, rows), 0
    if rows < 1:
        raise UserError(f"a row needs more than the {free / GIGA:.1f} GB of free memory; close other programs")
    root.mkdir(parents=True, exist_ok=True)
    return {
        "settings": settings_tree(settings),
        "config": inputs.config.model_dump(mode="json"),
        "rows": batch["rows"],
        "context": batch["context"],
        "micro_batch": rows,
        "largest": largest,
        "flops": figures["length"]["flops"],
        "documents": inputs.isolated,
        "directory": str(root.absolute()),
    }


def _child(job: dict[str, Any], settings: TrainSettings) -> dict[str, Any]:
    """Run a measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "ingot.stages.training.measure"],
        input=json.dumps({**job, "started": time.time()}),
        stdout=subprocess.PIPE,
        text=True,
        env={**child_environment(settings.loop.threads), "KINETO_LOG_LEVEL": "5"},  # the profiler is silent
    )
    if done.returncode:
        raise StageFailed(done.returncode if done.returncode in (2, 130) else 1)
    return json.loads(done.stdout.splitlines()[-1])
