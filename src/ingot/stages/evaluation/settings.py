"""Settings of the kinds that evaluate finished models: `evaluate`, `judge` and `fisher`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage
from ingot.evaluate.sandbox import Mode
from ingot.stages.training.settings import Mixture, RowLength


class EvaluateStageSettings(Settings):
    """`kind = "evaluate"`: evaluates trained models on held-out text and on tasks."""

    models: Annotated[list[str], Stage("model")] = Field(min_length=1)
    """Train or import stages to evaluate."""
    teacher: Annotated[str | None, Stage("model")] = None
    """One of the models, with which the others are compared: most likely tokens, KL divergence, and the predictions of
    sampled positions side by side."""
    data: Annotated[list[str] | None, STAGE] = None
    """Corpora whose held-out split is used; default: all that the models were trained on."""
    overlap: float = Field(default=0.5, ge=0, lt=1)
    """Fraction of a window that is context only. With 0.5, targets after the first window have at least half a window
    of context."""
    prompts: tuple[str, ...] = ()
    """Texts that models trained on plain text continue; shown in the report."""
    questions: tuple[str, ...] = ()
    """Questions that models trained on conversations answer; shown in the report."""
    context: RowLength | None = None
    """Tokens of a window; default: the model's context."""
    sample_tokens: int = Field(default=120, ge=1)
    """Length of those samples."""
    temperature: float = Field(default=0.8, ge=0)
    """Temperature of those samples."""
    exact_match: Annotated[list[str], STAGE] = Field(default_factory=list)
    """Corpora of conversations, or of prompts with a field `answer`, whose held-out questions are answered greedily. An
    answer is right if it equals the corpus's."""
    max_questions: int = Field(default=200, ge=1)
    """Most questions of each of them, evenly spaced."""
    limitations: Annotated[str, EXECUTION] = ""
    """What the models cannot do, in one sentence; shown with the results."""
    tasks: tuple[str, ...] = ()
    """Names of tasks that come with ingot, such as "icl-copy", or task files, such as "mine.jsonl"."""
    shots: int | None = Field(default=None, ge=0)
    """Examples before each item of a task; default: the task's own number."""
    run_code: bool = False
    """Whether tasks may run programs that a model has written."""
    sandbox: Mode = "bwrap"
    """How they run. `bwrap`: without network and without files of this machine; it needs bubblewrap. `weak`: guarded
    inside the interpreter, with known holes."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Arithmetic of the forward pass; `auto`: the best of the hardware, as training does, which is faster."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute; `auto` takes a GPU if there is one."""


class JudgeSettings(Settings):
    """`kind = "judge"`: models answer the same held-out prompts, and judges compare the answers."""

    models: Annotated[list[str], Stage("model")] = Field(min_length=1)
    """Train or import stages whose answers are judged."""
    against: Annotated[str, Stage("model")]
    """The stage with whose answers they are compared."""
    data: Annotated[str, STAGE]
    """Corpus of format chat, prompts or pairs, whose held-out prompts are answered."""
    by: Annotated[list[str], STAGE] = Field(min_length=1)
    """Judges: a reward stage; `"file.py:function"`, which returns scores of prompts and answers; or any other model,
    which compares two answers in both orders. The report checks for reward hacking between the first judge, the reward
    of training, and the second, the true objective."""
    prompts: int = Field(default=200, ge=1)
    """Most prompts to use, evenly spaced over the held-out ones."""
    max_new: int = Field(default=128, ge=1)
    """Longest answer in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. At 1, the entropy of the models and their KL divergence are measured too."""
    tie: float = Field(default=0.0, ge=0)
    """Largest difference of scores that is a tie."""
    question: str = "Which answer is better, A or B?"
    """Question to a model that compares two answers."""
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
    """`kind = "fisher"`: the diagonal Fisher information of a model, for penalties of kind ewc."""

    model: Annotated[str, Stage("model")]
    """Train or import stage."""
    data: Annotated[Mixture, STAGE]
    """Corpus stage -> its fraction of the tokens: the old task, on the training splits."""
    samples: int = Field(default=512, ge=1)
    """Rows (text) or conversations over which squared gradients are averaged."""
    labels: Literal["mixed", "sampled", "exact", "empirical"] = "mixed"
    """How labels are chosen. `sampled`: from the model's distribution. `mixed`: a random mix of all labels with the
    same mean and covariance, which has less noise where the model is confident. `exact`: the expectation over the
    vocabulary, with one backward pass for each token of it. `empirical`: the labels of the text, as a control; nearly
    zero for a confident model."""
    pool: int = Field(default=1, ge=1)
    """Rows of one backward pass, whose summed gradient is squared: faster on a GPU, and noisier. For labels mixed or
    sampled."""
    context: RowLength | None = None
    """Tokens of a row; default: the model's context."""
    previous: Annotated[str | None, Stage("importance")] = None
    """Fisher stage of earlier tasks, whose values times `gamma` are added (online EWC, one anchor for all tasks)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Factor of `previous`."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute, in fp32; `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _possible(self) -> "FisherSettings":
        if self.pool > 1 and self.labels not in ("mixed", "sampled"):
            raise ValueError(
                f"found pool = {self.pool} with labels = '{self.labels}', expected 1, because squaring a sum of "
                "gradients is unbiased only for sampled and mixed labels; leave pool out"
            )
        if "gamma" in self.model_fields_set and self.gamma != 1.0 and not self.previous:
            raise ValueError(f"found gamma = {self.gamma:g} without previous, expected a fisher stage; leave gamma out")
        return self
