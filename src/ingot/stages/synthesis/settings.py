"""Settings of the kinds that create data with models: `generate` and `label`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ingot.core.functions import is_function
from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage


class GenerateSettings(Settings):
    """`kind = "generate"`: samples a model's answers to the prompts of a corpus, as a corpus of conversations."""

    model: Annotated[str, Stage("model")]
    """Train or import stage that answers."""
    data: Annotated[str, Stage("documents")]
    """Corpus stage of format `prompts`; answers to its held-out prompts stay held out."""
    samples: int = Field(default=4, ge=1)
    """Answers to each prompt."""
    prompts: PositiveInt | None = None
    """Most training prompts to answer, drawn by the seed; the same fraction of held-out prompts; default: all."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens with this total probability."""
    max_new: int = Field(default=128, ge=1)
    """Longest answer in tokens."""
    unfinished: Literal["drop", "keep"] = "drop"
    """What to do with an answer that `max_new` or the context cut off. A model trained on it learns to stop there."""
    format: Literal["chat"] = "chat"
    """Format of the documents: conversations, in which only the model's answer is a training target."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""


class LabelSettings(Settings):
    """`kind = "label"`: scores or compares the answers of a `generate` stage; the result is a corpus."""

    RENAMED: ClassVar = {"least": "min_score"}

    data: Annotated[str, Stage("documents")]
    """The `generate` stage."""
    by: Annotated[str, STAGE] = Field(min_length=1)
    """Source of the labels: a train stage with objective `reward`; a reward function `"file.py:function"`; or
    `NAME.jsonl`, a file for human labels, which the stage writes when the answers are complete."""
    format: Literal["pairs", "chat"] = "pairs"
    """`pairs`: the best and the worst answer to each prompt; `chat`: the best one as a conversation."""
    min_score: float | None = None
    """Lowest score of a best answer that is kept; for `chat` only."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where a reward model computes, in fp32; `auto` takes a GPU if there is one."""

    @property
    def label_file(self) -> Path | None:
        """The file for human labels; None where a model or a function scores."""
        return Path(self.by) if self.by.endswith(".jsonl") else None

    @property
    def reward(self) -> str | None:
        """The stage of the reward model that scores; None where there is none."""
        return None if self.label_file or is_function(self.by) else self.by

    @model_validator(mode="after")
    def _min_score_is_read(self) -> "LabelSettings":
        if self.min_score is not None and (self.format != "chat" or self.label_file):
            raise ValueError(
                f'found min_score = {self.min_score:g}, which only format = "chat" with scores reads; leave it out'
            )
        return self
