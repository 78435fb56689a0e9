"""Settings of the kind `annotate`. No torch."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ingot.core.settings import EXECUTION, STAGE, Settings, Stage
from ingot.data.settings import PackingSettings
from ingot.objectives.settings import Temperature
from ingot.stages.training.settings import RowLength


class AnnotateSettings(Settings):
    """`kind = "annotate"`: stores a teacher's predictions for every token of some corpora, for its students."""

    data: Annotated[list[str], STAGE] = Field(min_length=1)
    """Corpora of text or conversations; all that the students are trained on."""
    teacher: Annotated[str, Stage("model")]
    """The teacher: a train or import stage, `hf:DIR`, or the directory of another run's train stage."""
    k: int = Field(default=64, ge=1)
    """Tokens of which the probability is stored, the most likely ones: 4 bytes each, 6 above 65,536 ids. The others are
    stored as one probability, the tail."""
    temperatures: tuple[Temperature, ...] = Field(default=(1.0, 2.0, 4.0), min_length=1)
    """Temperatures that students may use, from 0.01 to 100, 4 bytes a token each. The tail is exact at these and
    at no other."""
    context: RowLength | None = None
    """Tokens of a row that the teacher reads; default: its own context."""
    packing: PackingSettings = PackingSettings()
    """How documents are packed into rows; the same as in the students."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""

    @field_validator("packing")
    @classmethod
    def _one_prediction_per_token(cls, packing: PackingSettings) -> PackingSettings:
        if packing.stride is not None:
            raise ValueError(
                f"found stride = {packing.stride}, expected none: a token has one stored prediction; leave it out"
            )
        return packing

    @field_validator("temperatures")
    @classmethod
    def _distinct(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if len({f"{t:g}" for t in temperatures}) < len(temperatures):
            raise ValueError(f"found {list(temperatures)}, expected different temperatures; leave one out")
        return temperatures
