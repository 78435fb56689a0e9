"""Time, disk and price of a train stage, in addition to `forecast`. No torch."""

import bisect
import math
from collections.abc import Mapping
from typing import Any

from ingot.plan.cost import Work, evaluation_count, price, save_count, stage_seconds
from ingot.stages.training.calibration import read_speed, workload
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.phases import build_timeline, rows_per_draw
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Phase, Timeline, assumed_size
from ingot.train.settings import FEWEST_KEPT, FIRST_SAVE


def costs(
    settings: TrainSettings, inputs: ForecastInputs, figures: Mapping[str, Any], per_hour: float | None = None
) -> dict[str, Any]:
    """The figures `time`, `disk` and, with a price, `price`; and the largest micro-batch, under `fits`: None
    if it is not known, as with penalties that keep what the figures do not count.

    Args:
        settings: the stage.
        inputs: as for `forecast`.
        figures: the result of `forecast`.
        per_hour: price of an hour of one device.

    Returns:
        `time`: seconds by what they are spent on, their total, those of a step, what was noted with the measurement,
        and the fraction of the peak that training reaches (`mfu`); or None if this machine has not been measured. A
        price that depends on it is None too.
    """
    available, batch = figures["memory"]["available"], figures["batch"]
    rows = math.ceil(batch["rows"] / batch["ranks"])
    out: dict[str, Any] = {
        "disk": disk_bytes(settings, figures),
        "fits": None if settings.objective.reads_layers else rows_that_fit(settings, inputs, available, rows),
        "time": None,
        "here": inputs.here,
    }
    if inputs.here and (measured := read_speed(workload(settings, inputs, figures))):
        speed, noted = measured
        seconds = stage_seconds(speed, work_of(settings, inputs, figures, speed.step_s))
        out["time"] = {**seconds, "total": sum(seconds.values()), "step": speed.step_s, **noted}
        if peak := inputs.device.peak or noted.get("gemm_flops"):
            mfu = figures["length"]["flops"] / seconds["steps"] / (peak * inputs.ranks)
            out["time"] |= {
                "mfu": mfu,
                "peak_flops": peak,
                "peak_by": "data sheet" if inputs.device.peak else "measured",
            }
    hours = figures["length"]["gpu_hours"]
    if per_hour is not None and out["time"]:
        out["price"] = price(out["time"]["total"], inputs.ranks, per_hour)
    elif per_hour is not None:
        out["price"] = None if hours is None else hours * per_hour
    return out


def work_of(settings: TrainSettings, inputs: ForecastInputs, figures: Mapping[str, Any], step_s: float) -> Work:
    """What the stage does, in steps of the size of its largest one.

    Args:
        settings, inputs, figures: as for `costs`.
        step_s: seconds of such a step, on which the number of checkpoints depends.
    """
    timeline = build_timeline(settings, inputs.config, inputs.sizes or assumed_size)
    steps, batch, disk = timeline.steps, figures["batch"], disk_bytes(settings, figures)
    every, loop = settings.evaluate.interval(steps), settings.loop
    limit = settings.evaluate.tokens
    held_out = inputs.held_out if inputs.held_out is not None else dict.fromkeys(settings.corpora, limit)
    trained = dict.fromkeys(settings.corpora, limit)
    if inputs.sizes:
        longest = {
            name: p.context for p in sorted(timeline.phases, key=lambda p: p.context) for name in _used(timeline, p)
        }
        trained = {name: inputs.sizes(name, context).rows * context for name, context in longest.items()}
    return Work(
        steps=timeline.work(steps) * rows_per_draw(settings) / (batch["rows"] * batch["context"]),
        evaluations=evaluation_count(steps, every),
        evaluation_tokens=sum(min(limit, tokens) for tokens in (*held_out.values(), *trained.values())),
        final_tokens=sum(held_out.values()),
        saves=save_count(
            steps, step_s, [n for n in (loop.save_every, loop.keep_every) if n], FIRST_SAVE, 60 * loop.save_minutes
        ),
        checkpoint_bytes=disk["checkpoint"],
        best_bytes=disk["best"],
    )


def _used(timeline: Timeline, phase: Phase) -> list[str]:
    """The corpora of a phase."""
    return [name for name, fraction in zip(timeline.sources, phase.fractions, strict=True) if fraction]


def disk_bytes(settings: TrainSettings, figures: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the stage's directory: a checkpoint has the trained weights and the optimizer's state, the best ones
    have weights alone. While one is written, there is one more than is kept."""
    element = 8 if settings.precision == "fp64" else 4
    trained = figures["parameters"]["trained"]
    best = element * trained
    checkpoint = best + figures["memory"]["optimizer"] * figures["mesh"]["shard"]
    kept = (
        max(FEWEST_KEPT, settings.loop.keep) + 1 + figures["length"]["steps"] // (settings.loop.keep_every or math.inf)
    )
    return {"checkpoint": checkpoint, "best": best, "total": int(kept) * checkpoint + best}


def rows_that_fit(settings: TrainSettings, inputs: ForecastInputs, available: float, most: int) -> int:
    """Rows of the largest micro-batch whose memory is available, at most `most`; 0 if none does. By bisection, since
    memory is no line over the rows."""

    def too_much(rows: int) -> bool:
        loop = settings.loop.model_copy(update={"micro_batch": rows})
        return forecast(settings.model_copy(update={"loop": loop}), inputs)["memory"]["total"] > available

    return bisect.bisect_left(range(1, most + 1), True, key=too_much)
