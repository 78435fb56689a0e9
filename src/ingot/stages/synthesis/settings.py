"""Settings of the kinds that create data with models: `generate` and `label`."""

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator, model_validator

from ingot.core.functions import is_function
from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage

MAJORITY = "majority"
"""The value of `by` with which a label stage scores answers by their agreement."""
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class EndpointSettings(Settings):
    """`endpoint = { url = "https://HOST/v1", model = "NAME", key = "VARIABLE" }`: a model behind an OpenAI-compatible
    interface."""

    url: str
    """Address without `/chat/completions`."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    key: Annotated[str | None, EXECUTION] = None
    """Environment variable that holds the key; default: no key is sent."""
    parallel: Annotated[int, EXECUTION] = Field(default=8, ge=1)
    """Most requests at once."""
    tries: Annotated[int, EXECUTION] = Field(default=6, ge=1)
    """How often a request is sent at most, after 429, a server's error or no answer; with growing pauses."""
    timeout: Annotated[float, EXECUTION] = Field(default=120.0, gt=0, le=86400)
    """Seconds within which an answer must be complete."""
    max_requests: Annotated[int, EXECUTION] = Field(default=10_000, ge=1)
    """Most requests of the stage; one that needs more is refused before the first."""
    max_tokens: Annotated[int, EXECUTION] = Field(default=10_000_000, ge=1)
    """Most tokens of the stage, prompts and answers as the endpoint counts them; the stage stops there and resumes with
    a higher limit."""

    def missing_key(self) -> str | None:
        """What is missing before the endpoint can be asked, as text after "waiting"; None if nothing is."""
        if self.key and not os.environ.get(self.key, "").strip():
            return f"for the key of {self.url} in the environment variable {self.key}"
        return None

    @field_validator("key")
    @classmethod
    def _name_of_a_variable(cls, key: str | None) -> str | None:
        if key is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise ValueError(  # without the value, which may be the key itself
                "found something else than a name, expected that of the environment variable that holds the key, such "
                'as "OPENAI_API_KEY"; never write the key itself in a recipe'
            )
        return key

    @model_validator(mode="after")
    def _safe_address(self) -> "EndpointSettings":
        try:
            parts = urlsplit(self.url)
            host = parts.hostname if parts.port != 0 and not re.search(r"\s", self.url) else None
            (host or "").encode("idna")
        except ValueError:  # UnicodeError is one
            parts, host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
            raise ValueError(f"found url = '{self.url}', expected one such as https://api.example.com/v1; correct it")
        if self.key and parts.scheme == "http" and host not in THIS_MACHINE:
            raise ValueError(f"found a key for {self.url}, which would send it unencrypted; use https://")
        return self


class GenerateSettings(Settings):
    """`kind = "generate"`: a model's answers to the prompts of a corpus, or prompts like them, as a corpus."""

    model: Annotated[str | None, Stage("model")] = None
    """Train or import stage that writes."""
    endpoint: EndpointSettings | None = None
    """A model that answers over the network, instead of `model`."""
    data: Annotated[str, Stage("documents")]
    """Corpus of format `prompts`; what is written to its held-out prompts stays held out."""
    format: Literal["chat", "prompts"] = "chat"
    """`chat`: answers, as conversations in which only the model's answer is a training target. `prompts`: new prompts
    like those of `data`, for a generate stage that answers them."""
    samples: int = Field(default=4, ge=1)
    """Answers to each prompt; for `prompts` lists of new prompts for each prompt. With temperature = 0 it must be 1."""
    prompts: PositiveInt | None = None
    """Most training prompts to use, drawn by the seed; the same fraction of held-out prompts; default: all."""
    system: str | None = Field(default=None, min_length=1)
    """System message for the model that is not part of the documents: how to answer, or what to write about."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Whether the reasoning before an answer is kept: in the field of an endpoint, or up to `</think>`."""
    examples: int = Field(default=4, ge=1)
    """For `prompts`: prompts of `data` that are shown, the prompt and others drawn by the seed."""
    new: int = Field(default=8, ge=1)
    """For `prompts`: new prompts in a list."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens with this total probability."""
    max_new: int = Field(default=128, ge=1)
    """Longest answer in tokens, reasoning included."""
    unfinished: Literal["drop", "keep"] = "drop"
    """What to do with an answer that was cut off, or with the last prompt of a list that was. A model trained on an
    answer that was cut off learns to stop there."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where `model` computes, in fp32; `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _one_model(self) -> "GenerateSettings":
        if (self.model is None) == (self.endpoint is None):
            found = "neither model nor endpoint" if self.model is None else "both model and endpoint"
            raise ValueError(f"found {found}, expected one of them; name what writes")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"found samples = {self.samples} with temperature = 0, which writes the same text each time; set "
                "samples = 1, or a temperature above 0"
            )
        for name in ("examples", "new") if self.format == "chat" else ("reasoning",):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f'found {name} = {value} with format = "{self.format}", which does not read it; leave it out'
                )
        return self


class LabelSettings(Settings):
    """`kind = "label"`: scores or compares the answers of a `generate` stage; the result is a corpus."""

    RENAMED: ClassVar = {"least": "min_score"}

    data: Annotated[str, Stage("documents")]
    """The `generate` stage."""
    by: Annotated[str, STAGE] = Field(min_length=1)
    """Source of the labels: a train stage with objective `reward`; a reward function `"file.py:function"`; `majority`,
    the fraction of a prompt's answers that agree with this one; or `NAME.jsonl`, a file for human labels, which the
    stage writes when the answers are complete."""
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
        return None if self.label_file or is_function(self.by) or self.by == MAJORITY else self.by

    @model_validator(mode="after")
    def _min_score_is_read(self) -> "LabelSettings":
        if self.min_score is not None and (self.format != "chat" or self.label_file):
            raise ValueError(
                f'found min_score = {self.min_score:g}, which only format = "chat" with scores reads; leave it out'
            )
        return self
