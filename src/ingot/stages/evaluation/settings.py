"""Settings of the stages that measure finished models: `evaluate`, `judge` and `fisher`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage
from ingot.stages.training.settings import RowLength, Shares


class EvaluateStageSettings(Settings):
    """`kind = "evaluate"`: trained models judged on held-out text."""

    models: Annotated[list[str], Stage("model")] = Field(min_length=1)
    """Train or import stages to judge."""
    data: Annotated[list[str] | None, STAGE] = None
    """Corpora whose held-out part is read; default: all that the models were trained on."""
    overlap: float = Field(default=0.5, ge=0, lt=1)
    """Share of a window that is context only: with 0.5 every target but the first sees at least half a window."""
    prompts: tuple[str, ...] = ()
    """Texts that models of running text go on from; shown in the report."""
    questions: tuple[str, ...] = ()
    """Questions that models trained on conversations answer; shown in the report."""
    context: RowLength | None = None
    """Tokens of a window; default: the model's context."""
    sample_tokens: int = Field(default=120, ge=1)
    """Length of those samples."""
    temperature: float = Field(default=0.8, ge=0)
    """Temperature of those samples."""
    tasks: tuple[str, ...] = ()
    """Abilities: names of tasks that come with the package ("icl-copy" ...), or task files ("mine.jsonl")."""
    shots: int | None = Field(default=None, ge=0)
    """Examples in front of each item of a task; default: the task's own number."""
    run_code: bool = False
    """Whether tasks of kind code may run what a model writes (a process without network or files, with limits)."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""


class JudgeSettings(Settings):
    """`kind = "judge"`: models answer the same held-out prompts, and judges say which answers are better."""

    models: Annotated[list[str], Stage("model")] = Field(min_length=1)
    """Train or import stages whose answers are judged."""
    against: Annotated[str, Stage("model")]
    """The stage whose answers theirs are compared with."""
    data: Annotated[str, STAGE]
    """Corpus of format chat, prompts or pairs, whose held-out prompts are asked."""
    by: Annotated[list[str], STAGE] = Field(min_length=1)
    """Judges: a reward stage; `"file.py:function"`, called with prompts and answers, that returns scores; or any other
    model, which is asked which of two answers is better, in both orders. The first is what was trained against and the
    second what is wanted, where the report looks for a reward that is gamed."""
    prompts: int = Field(default=200, ge=1)
    """Most prompts asked; evenly spaced where there are more."""
    max_new: int = Field(default=128, ge=1)
    """Longest answer in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of the answers. At 1 the entropy and the KL between the models are measured too."""
    tie: float = Field(default=0.0, ge=0)
    """Scores at most this far apart are a tie."""
    question: str = "Which answer is better, A or B?"
    """What a model that judges is asked about two answers."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _different(self) -> "JudgeSettings":
        for name, names in (("models", self.models), ("by", self.by)):
            if len(set(names)) < len(names):
                raise ValueError(f"found a name twice in {name}, expected different ones; leave one out")
        if self.models == [self.against]:
            raise ValueError(f"found '{self.against}' against itself, expected another model; name one in models")
        return self


class FisherSettings(Settings):
    """`kind = "fisher"`: which weights of a model its predictions hang on, for penalties of kind ewc."""

    model: Annotated[str, Stage("model")]
    """Train or import stage."""
    data: Annotated[Shares, STAGE]
    """Corpus stage -> its share of the tokens: what must not be forgotten; their training parts are read."""
    samples: int = Field(default=512, ge=1)
    """Rows (text) or conversations whose gradients are squared and averaged; one forward and backward pass each."""
    labels: Literal["mixed", "sampled", "exact", "empirical"] = "mixed"
    """The true Fisher: sampled, each label drawn from the model; mixed, a random mix of all labels with a draw's mean
    and covariance, and less noise where the model is sure; exact, the sum over the vocabulary, as many backward passes
    a token. empirical: the text's own labels, nearly zero for a model that is sure; a control."""
    pool: int = Field(default=1, ge=1)
    """Rows of one backward pass, squared together: quicker on a GPU and noisier; for labels mixed or sampled."""
    context: RowLength | None = None
    """Tokens of a row; default: the model's context."""
    previous: Annotated[str | None, Stage("importance")] = None
    """Fisher stage of the tasks before: its values times `gamma` are added (online EWC, one anchor for all tasks)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """How much of `previous` stays."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _possible(self) -> "FisherSettings":
        if self.pool > 1 and self.labels not in ("mixed", "sampled"):
            raise ValueError(
                f"found pool = {self.pool} with labels = '{self.labels}', expected 1: only where the model draws or "
                "mixes labels is the square of a sum of gradients right on average; leave pool out"
            )
        if "gamma" in self.model_fields_set and self.gamma != 1.0 and not self.previous:
            raise ValueError(f"found gamma = {self.gamma:g} without previous, expected a fisher stage; leave gamma out")
        return self
