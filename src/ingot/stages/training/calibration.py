"""Measured speeds of train stages on this machine, kept in the user's cache. No torch.

A speed belongs to a machine and to the work that a stage does: the model's shape, the batch, what trains it and in
which precision; not to its data, its length or its learning rate. `ingot plan --measure` writes it before a run
(`measure.py`), and every run that is not resumed writes that of its own at its end.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_json, cache_directory, digest_json, read_json
from ingot.core.errors import UserError
from ingot.core.process import usable_cores
from ingot.plan.cost import Speed
from ingot.plan.machine import Device
from ingot.stages.training.forecast import ForecastInputs
from ingot.stages.training.phases import trained_config
from ingot.stages.training.settings import TrainSettings

_NOT_SPEED = {
    "micro_batch",
    "log_every",
    "save_every",
    "save_minutes",
    "keep",
    "keep_every",
    "restarts",
    "hang_minutes",
}
"""Settings of `loop` that do not change the speed, or are part of the batch."""
_NOT_SPEED_OPTIM = {
    *("lr", "betas", "eps", "weight_decay", "decay_embeddings", "clip"),
    *("schedule", "warmup", "min_ratio", "decay_steps", "cooldown", "cooldown_shape"),
}


def workload(settings: TrainSettings, inputs: ForecastInputs, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What the speed of a stage depends on, machine included.

    Args:
        settings: the stage.
        inputs: its initial model, its device, its ranks.
        figures: of `forecast`.
    """
    optim = settings.optim.model_dump(mode="json", exclude=_NOT_SPEED_OPTIM)
    auto_compiled = settings.loop.backend == "auto" and (inputs.device.is_gpu or "why_backend" in figures["execution"])
    return {
        "machine": machine(inputs.device),
        "model": trained_config(settings, inputs.config).model_dump(mode="json"),
        "isolated": inputs.isolated,
        "adapter": settings.adapter and settings.adapter.model_dump(mode="json"),
        "objective": settings.objective.model_dump(mode="json"),
        "penalties": [penalty.model_dump(mode="json") for penalty in settings.penalties],
        "companions": f"{inputs.companions:.2g}",  # a reward model has a row more than its base
        "optim": {name: value if isinstance(value, str) else bool(value) for name, value in optim.items()},
        "precision": settings.precision,
        "batch": {name: figures["batch"][name] for name in ("rows", "context", "micro_batch", "ranks")},
        "mesh": settings.mesh.model_dump(mode="json") if inputs.ranks > 1 else None,
        "loop": settings.loop.model_dump(mode="json", exclude=_NOT_SPEED),
        "sample": 0 if settings.evaluate.sample is False else settings.evaluate.sample_tokens,
        "length": round(math.log2(figures["length"]["flops"])) if auto_compiled else None,  # long runs are compiled
    }


def machine(device: Device) -> dict[str, Any]:
    """This machine, and the version of torch that computes on it."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {
        "device": device.name,
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "torch": torch,
    }


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def read_speed(work: Mapping[str, Any]) -> tuple[Speed, dict[str, Any]] | None:
    """The measured speed of a workload, and what else was noted with it; None if there is none that can be read."""
    try:
        noted = dict(read_json(_path(work)))
        noted.pop("work")
        return Speed(**noted.pop("speed")), noted
    except (OSError, UserError, TypeError, ValueError, KeyError):
        return None


def write_speed(work: Mapping[str, Any], speed: Speed, **noted: Any) -> None:
    """Keep the measured speed of a workload; a newer one takes its place.

    Args:
        noted: what else is known, as JSON data: how it was measured, the peak of memory.
    """
    path = _path(work)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_json(path, {"speed": asdict(speed), **noted, "work": dict(work)})


def _path(work: Mapping[str, Any]) -> Path:
    return cache_directory() / "speed" / f"{digest_json(dict(work))[:24]}.json"
