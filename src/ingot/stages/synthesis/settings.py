"""Settings of the two kinds that make data with models: `generate` and `label`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from ingot.core.functions import is_function
from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage


class GenerateSettings(Settings):
    """`kind = "generate"`: a model's answers to the prompts of a corpus, as a corpus of conversations."""

    model: Annotated[str, Stage("model")]
    """Train or import stage that answers."""
    data: Annotated[str, Stage("documents")]
    """Corpus stage of format `prompts`; answers to its held-out prompts stay held out."""
    samples: int = Field(default=4, ge=1)
    """Answers to each prompt."""
    prompts: PositiveInt | None = None
    """Most training prompts that are asked, drawn by the seed (of held-out ones as large a share); default: all."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that have this much probability together are drawn."""
    max_new: int = Field(default=128, ge=1)
    """Longest answer in tokens."""
    unfinished: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that `max_new` or the context cut off: who learns from it would learn to stop there."""
    format: Literal["chat"] = "chat"
    """What a document is: a conversation, of which the model's answer alone is learned."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""


class LabelSettings(Settings):
    """`kind = "label"`: somebody judges the answers of a `generate` stage; the outcome is a corpus."""

    data: Annotated[str, Stage("documents")]
    """The `generate` stage."""
    by: Annotated[str, STAGE] = Field(min_length=1)
    """Who judges: a train stage with objective `reward`; `"file.py:function"`, as a reward is written; or `NAME.jsonl`,
    a file that people fill, which is written once the answers are there."""
    format: Literal["pairs", "chat"] = "pairs"
    """`pairs`: the best and the worst answer to each prompt; `chat`: the best one as a conversation to learn from."""
    least: float | None = None
    """`chat`: a best answer with a lower score is left out."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where a reward model computes, in fp32; `auto` takes a GPU if there is one."""

    @property
    def people(self) -> Path | None:
        """The file that people fill."""
        return Path(self.by) if self.by.endswith(".jsonl") else None

    @property
    def reward(self) -> str | None:
        """The stage that scores."""
        return None if self.people or is_function(self.by) else self.by

    @model_validator(mode="after")
    def _least_is_read(self) -> "LabelSettings":
        if self.least is not None and (self.format != "chat" or self.people):
            raise ValueError(
                f'found least = {self.least:g}, which only format = "chat" with scores reads; leave it out'
            )
        return self
