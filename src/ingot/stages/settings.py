"""Settings of the stage kinds that put several rooms together: `train` and `evaluate`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ingot.core.recipe import EXECUTION, Settings
from ingot.data.settings import PackingSettings
from ingot.model.settings import ModelSettings
from ingot.objectives.settings import LanguageModelSettings, ObjectiveSettings
from ingot.optim.settings import OptimSettings
from ingot.train.duration import Duration
from ingot.train.settings import EvaluateSettings, LoopSettings, Precision


class TrainSettings(Settings):
    """`kind = "train"`: pretraining, fine-tuning, and every other objective."""

    data: dict[str, float]
    """Corpus stage -> its share of the tokens, for example { clean = 0.9, questions = 0.1 }."""
    duration: str
    """How long: "5000 steps", "3M tokens", "1 epoch" or "20 tokens/param"."""
    tokenizer: str | None = None
    """Tokenizer stage; left out where `init` brings one."""
    init: str | None = None
    """Train stage whose weights this one starts from; random weights where absent."""
    model: ModelSettings | None = None
    """Shape of a model that starts from random weights."""
    batch: int | None = Field(default=None, ge=1)
    """Rows of `context` tokens in one update; default: 512 x depth^2 tokens."""
    objective: ObjectiveSettings = LanguageModelSettings()
    """What is learned."""
    packing: PackingSettings = PackingSettings()
    """How documents are laid out in rows."""
    optim: OptimSettings = OptimSettings()
    """Optimizer and schedule."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation while training."""
    precision: Precision = "auto"
    """Arithmetic of the forward and backward pass; weights and moments are fp32 (fp64 under `fp64`)."""
    seed: int | None = None
    """Overrides [run] seed for this stage."""
    loop: LoopSettings = LoopSettings()
    """How the run is executed; no setting here changes its result."""

    @field_validator("duration")
    @classmethod
    def _readable(cls, text: str) -> str:
        Duration.parse(text)
        return text

    @field_validator("data")
    @classmethod
    def _shares(cls, data: dict[str, float]) -> dict[str, float]:
        if not data:
            raise ValueError("found no corpus, expected at least one, for example { clean = 1.0 }")
        for name, share in data.items():
            if share <= 0:
                raise ValueError(f"the share of {name} is {share}, expected more than 0; leave the corpus out instead")
        return data

    @model_validator(mode="after")
    def _one_origin(self) -> "TrainSettings":
        if self.init and self.tokenizer:
            raise ValueError(
                f"found both init = '{self.init}' and a tokenizer, expected one: the tokenizer comes with init"
            )
        if self.init and self.model:
            raise ValueError(f"found both init = '{self.init}' and a model, expected one: the shape comes with init")
        if not self.init and not self.tokenizer:
            raise ValueError("found neither init nor tokenizer; name the tokenizer stage (or the stage to start from)")
        return self


class EvaluateStageSettings(Settings):
    """`kind = "evaluate"`: trained models judged on held-out text."""

    models: list[str] = Field(min_length=1)
    """Train stages to judge."""
    data: list[str] | None = None
    """Corpora whose held-out part is read; default: all that the models were trained on."""
    overlap: float = Field(default=0.5, ge=0, lt=1)
    """Share of a window that is context only: with 0.5 every target but the first sees at least half a window."""
    prompts: tuple[str, ...] = ()
    """Texts that models of running text go on from; shown in the report."""
    questions: tuple[str, ...] = ()
    """Questions that models trained on conversations answer; shown in the report."""
    sample_tokens: int = Field(default=120, ge=1)
    """Length of those samples."""
    temperature: float = Field(default=0.8, ge=0)
    """Temperature of those samples."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""
