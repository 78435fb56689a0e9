"""What a plan predicts of a run, logged before its first step; what the run took, kept for later plans. No torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.events import EventLog, read_events
from ingot.model.config import ModelConfig
from ingot.plan.cost import Speed, Work
from ingot.plan.machine import cpu, this_machine
from ingot.stages.training.calibration import read_speed, workload, write_speed
from ingot.stages.training.costs import costs, work_of
from ingot.stages.training.data import Data
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.settings import TrainSettings


@dataclass(frozen=True)
class Prediction:
    """The plan of a run, with all that is known when it starts."""

    settings: TrainSettings
    inputs: ForecastInputs
    figures: Mapping[str, Any]

    def log(self, log: EventLog) -> None:
        """Write the event `predicted`: seconds (None if this machine has not been measured) and bytes of tensors."""
        log.write("predicted", seconds=self.figures["time"], peak_bytes=self.figures["memory"]["total"])

    def keep(self, metrics: Path) -> None:
        """Keep the speed of the finished run for later plans; not that of a run of a single step.

        Args:
            metrics: its log.
        """
        seconds = read_events(metrics, "speed")[-1]["seconds"]
        if not {"step", "save", "evaluation", "final evaluation"} <= seconds.keys():
            return
        start_s = read_events(metrics, "predicted")[-1]["time"] - read_events(metrics, "start")[-1]["time"]
        work = workload(self.settings, self.inputs, self.figures)
        known = read_speed(work)
        noted = {**(known[1] if known else {}), "by": "a run"}
        speed = run_speed(seconds, work_of(self.settings, self.inputs, self.figures, 1.0), start_s)
        with suppress(OSError):  # a run does not fail because the cache cannot be written
            write_speed(work, speed, **noted)


def run_speed(seconds: Mapping[str, float], work: Work, start_s: float) -> Speed:
    """The speed of a run, from its mean seconds.

    What an evaluation takes beyond its tokens and the writing of the best weights counts as its sample.

    Args:
        seconds: the event `speed`: mean seconds of a step, an evaluation and a save, those of the first step and of the
            final evaluation.
        work: what the run did.
        start_s: seconds before training.
    """
    byte_s = seconds["save"] / work.checkpoint_bytes
    evaluation_s = max(0.0, seconds["evaluation"] - work.best_bytes * byte_s)
    token_s = (
        seconds["final evaluation"] / work.final_tokens if work.final_tokens else evaluation_s / work.evaluation_tokens
    )
    return Speed(
        step_s=seconds["step"],
        token_s=token_s,
        sample_s=max(0.0, evaluation_s - work.evaluation_tokens * token_s),
        byte_s=byte_s,
        start_s=start_s + max(0.0, seconds["first"] - seconds["step"]),
    )


def predict(
    settings: TrainSettings, initial: ModelConfig, data: Data, device: str, ranks: int, companions: int
) -> Prediction:
    """Plan a run.

    Args:
        initial: the initial model.
        device: "cpu" or "cuda".
        companions: parameters of the companions that steps read.
    """
    inputs = ForecastInputs(
        initial,
        cpu() if device == "cpu" else this_machine(),
        ranks,
        data.source_size,
        any(source.isolate for source in data.train_sources),
        companions,
        data.held_out_tokens,
    )
    figures = forecast(settings, inputs)
    return Prediction(settings, inputs, figures | costs(settings, inputs, figures))
