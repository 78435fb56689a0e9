"""Settings of the stages that make models: `train` and `import`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, PositiveInt, Tag, model_validator

from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage
from ingot.data.settings import PackingSettings
from ingot.model.adapter_config import ADAPTER, AdapterSettings
from ingot.model.config import ModelSettings
from ingot.objectives.settings import OBJECTIVES, LanguageModelSettings, ObjectiveSettings
from ingot.optim.settings import OptimSettings, ScheduleKind
from ingot.train.duration import Duration
from ingot.train.penalty_settings import ANCHORS, EwcSettings, PenaltySettings
from ingot.train.settings import EvaluateSettings, LoopSettings, Precision


def _readable(text: str) -> str:
    Duration.parse(text)
    return text


def _positive(data: dict[str, float]) -> dict[str, float]:
    if not data:
        raise ValueError("found no corpus, expected at least one, for example { clean = 1.0 }")
    for name, share in data.items():
        if share <= 0:
            raise ValueError(f"the share of {name} is {share}, expected more than 0; leave the corpus out instead")
    return data


Length = Annotated[str, AfterValidator(_readable)]
"""A duration: "5000 steps", "3M tokens", "1 epoch", "20 tokens/param"."""
Shares = Annotated[dict[str, float], AfterValidator(_positive)]
"""Corpus -> its share of the tokens, any positive scale."""


def _listed(table: Mapping[str, Any]) -> list[Any]:
    """The penalties of a table that has not been validated."""
    found = table.get("penalties", ())
    return list(found) if isinstance(found, list | tuple) else []


class RampSettings(Settings):
    """`batch = { from = 16, to = 1600, over = "12B tokens" }`: a batch that grows linearly, and then stays."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    start: int = Field(alias="from", ge=1)
    """Rows of the first step (written `from` in a recipe)."""
    to: int = Field(ge=2)
    """Rows of a step at the end of the ramp and after it."""
    over: Length
    """Length of the ramp in any unit of a duration: "12B tokens" grows with tokens seen, "500 steps" with steps."""

    @model_validator(mode="after")
    def _grows(self) -> "RampSettings":
        if self.to <= self.start:
            raise ValueError(
                f"found from = {self.start} and to = {self.to}, expected a batch that grows; "
                f"write batch = {self.to} for one that does not"
            )
        return self


RowLength = Annotated[int, Field(ge=2)]
"""Tokens of a row: one at least that is read, and one that is predicted."""


def _form(value: Any) -> str:
    return "Ramp" if isinstance(value, Mapping | RampSettings) else "Rows"


RowsPerUpdate = Annotated[
    Annotated[PositiveInt, Tag("Rows")] | Annotated[RampSettings, Tag("Ramp")],
    Discriminator(_form),
]
"""Rows of an update: a number, or a ramp."""


class PhaseSettings(Settings):
    """`[[stage.base.phases]]`: one part of a stage's steps. What a phase leaves out is as the stage has it."""

    name: Annotated[str, EXECUTION] = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$")
    """What logs and `ingot status` call it."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Its part of the stage's duration; the shares of all phases add up to 1."""
    duration: Length | None = None
    """Instead of a share: its own duration."""
    data: Annotated[Shares | None, STAGE] = None
    """Its own mixture."""
    context: RowLength | None = None
    """Its own length of rows; the model's context is the largest of all phases."""
    batch: RowsPerUpdate | None = None
    """Its own rows of an update; a ramp here begins with the phase, one of the stage runs through its phases."""
    lr: float | None = Field(default=None, gt=0)
    """Peak of its own learning-rate curve; default: the rate at which the phase before ended."""
    schedule: ScheduleKind | None = None
    """What follows its warmup, down to the end of the phase."""
    warmup: float | None = Field(default=None, ge=0)
    """Steps (below 1 a share of the phase) from the rate of the phase before to its peak; default: none."""
    min_ratio: float | None = Field(default=None, ge=0, le=1)
    """Floor of its curve as a share of its peak."""

    @property
    def has_curve(self) -> bool:
        """Whether it has a learning-rate curve of its own; otherwise the stage's runs through it."""
        return any(v is not None for v in (self.lr, self.schedule, self.warmup, self.min_ratio))

    def curve(self, optim: OptimSettings, first: bool, lr: float | None) -> OptimSettings:
        """Settings of its own learning-rate curve.

        Args:
            optim: the stage's, for what the phase leaves out.
            first: whether it is the first phase, which warms up as the stage says; a later one does not by itself.
            lr: the rate at which the phase before ended, if there is one.
        """
        kind = self.schedule or optim.schedule
        names = ("min_ratio", "cooldown", "cooldown_shape") if kind == optim.schedule else ()
        table = {name: getattr(optim, name) for name in names}
        own = {"lr": self.lr or lr or optim.lr, "warmup": self.warmup, "min_ratio": self.min_ratio}
        table |= {name: value for name, value in own.items() if value is not None}
        return OptimSettings.model_validate(
            {"warmup": optim.warmup if first else 0.0, **table, "kind": optim.kind, "schedule": kind}
        )

    @model_validator(mode="after")
    def _one_length(self) -> "PhaseSettings":
        if (self.share is None) == (self.duration is None):
            found = "neither" if self.share is None else "both"
            raise ValueError(f"found {found} of share and duration in phase '{self.name}', expected exactly one")
        return self


class TrainSettings(Settings):
    """`kind = "train"`: pretraining, fine-tuning, and every other objective."""

    data: Annotated[Shares | None, STAGE] = None
    """Corpus stage -> its share of the tokens, for example { clean = 0.9, questions = 0.1 }; left out where every phase
    has its own."""
    duration: Length | None = None
    """How long: "5000 steps", "3M tokens", "1 epoch" or "20 tokens/param"; left out where every phase has its own."""
    phases: tuple[PhaseSettings, ...] = ()
    """Parts of the duration, one after another, with a mixture, a context, a batch, a learning rate of their own."""
    tokenizer: Annotated[str | None, Stage("tokenizer")] = None
    """Tokenizer stage; left out where `init` brings one."""
    init: Annotated[str | None, Stage("model")] = None
    """What this stage starts from: a train or import stage, `hf:DIR`, or the directory of another run's train stage;
    random weights where absent."""
    model: ModelSettings | None = None
    """Shape of a model that starts from random weights."""
    context: RowLength | None = None
    """Tokens of a row where the model comes with `init`; default: its context, which may be longer than wanted."""
    batch: RowsPerUpdate | None = None
    """Rows of `context` tokens in one update: a number, or a ramp { from = 16, to = 1600, over = "12B tokens" }.
    Default: 512 x depth^2 tokens."""
    adapter: Annotated[AdapterSettings | None, ADAPTER] = None
    """Leave the model of `init` as it is and train a small correction: { kind = "lora", rank = 16 }, or "lora" for
    short; who starts from this stage, or uses it, gets both merged."""
    objective: ObjectiveSettings = LanguageModelSettings()
    """What is learned."""
    penalties: tuple[PenaltySettings, ...] = ()
    """What must not be forgotten meanwhile: { kind = "ewc", fisher = "STAGE", weight = 100 }, { kind = "l2sp", weight =
    0.01 }, { kind = "kl", reference = "STAGE", weight = 0.1 }. With ewc or l2sp, weights do not decay."""
    packing: PackingSettings = PackingSettings()
    """How documents are laid out in rows."""
    optim: OptimSettings = OptimSettings()
    """Optimizer and schedule."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation while training."""
    precision: Precision = "auto"
    """Arithmetic of the forward and backward pass: fp32, tf32, bf16, fp16 (with loss scaling), fp64, or auto, what the
    hardware has; weights and moments are fp32 (fp64 under `fp64`)."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    loop: LoopSettings = LoopSettings()
    """How the run is executed; no setting here changes its result."""

    @property
    def corpora(self) -> list[str]:
        """All corpora of all phases."""
        return list(dict.fromkeys(name for part in self.parts for name in self.mixture(part)))

    @property
    def parts(self) -> tuple[PhaseSettings, ...]:
        """The phases; without any, one that is all of the stage."""
        return self.phases or (PhaseSettings(name="all", share=1.0),)

    def mixture(self, part: PhaseSettings) -> Mapping[str, float]:
        """What a phase draws from: its own corpora, or the stage's."""
        return part.data or self.data or {}

    def context_of(self, part: PhaseSettings, came: int) -> int:
        """Tokens of a phase's rows: its own, the stage's, or as many as the model has come with."""
        return part.context or self.context or came

    def longest(self, came: int) -> int:
        """Context of the trained model, which came with so many tokens: that of the longest rows, and no less than
        `init` had."""
        own = max(self.context_of(part, came) for part in self.parts)
        return max(own, came) if self.init else own

    def companions(self) -> dict[str, str]:
        """Role -> stage of every frozen model that a part of these settings names by its own `companions()`.

        A part that names none for a role (None) means the stage this one starts from.

        Raises:
            ValueError: there is no such stage.
        """
        found: dict[str, str] = {}
        for name, part in (("objective", self.objective), *(("penalties", penalty) for penalty in self.penalties)):
            for role, stage in part.companions().items():
                if stage is None and self.init is None:
                    raise ValueError(f"found no {role} in {name} and no init, expected one; name a trained stage")
                found[role] = stage or self.init or ""
        return found

    @property
    def fishers(self) -> list[str]:
        """Fisher stages that penalties read."""
        return [p.fisher for p in self.penalties if isinstance(p, EwcSettings)]

    @property
    def penalty_names(self) -> list[str]:
        """What logs call each penalty: penalty/KIND, and its stage where there are several of a kind."""
        kinds = [p.kind for p in self.penalties]
        stages = ["" if kinds.count(p.kind) == 1 else f"/{p.stage or 'init'}" for p in self.penalties]
        return [f"penalty/{kind}{stage}" for kind, stage in zip(kinds, stages, strict=True)]

    @model_validator(mode="before")
    @classmethod
    def _no_decay_beside_an_anchor(cls, table: Any) -> Any:
        """Decay pulls to zero what an anchor holds, so its default there is 0."""
        if not isinstance(table, Mapping):
            return table
        kinds = [p.get("kind") if isinstance(p, Mapping) else getattr(p, "kind", None) for p in _listed(table)]
        optim = table.get("optim", {})
        if isinstance(optim, Mapping) and any(kind in ANCHORS for kind in kinds):
            return {**table, "optim": {"weight_decay": 0.0, **optim}}
        return table

    @model_validator(mode="after")
    def _anchored(self) -> "TrainSettings":
        anchors = [p.kind for p in self.penalties if p.kind in ANCHORS]
        if anchors and self.optim.weight_decay:
            raise ValueError(
                f"found optim.weight_decay = {self.optim.weight_decay:g} beside the penalty {anchors[0]}, expected 0: "
                "decay pulls weights to zero, the penalty to where they were; leave weight_decay out"
            )
        if twice := [n for n in dict.fromkeys(self.penalty_names) if self.penalty_names.count(n) > 1]:
            raise ValueError(f"found {twice[0]} twice, expected once; add up their weights")
        if not self.init and any(p.kind == "l2sp" or (p.kind == "kl" and not p.reference) for p in self.penalties):
            raise ValueError("found a penalty that keeps what init knew, and no init; name the stage to start from")
        return self

    @model_validator(mode="after")
    def _whole(self) -> "TrainSettings":
        """Every step has a mixture and belongs to one phase."""
        names = [p.name for p in self.phases]
        if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
            raise ValueError(f"found more than one phase named '{twice[0]}', expected different names")
        own_data = [p.name for p in self.phases if p.data]
        if self.data is None and (not names or len(own_data) < len(names)):
            lacking = f" and phase '{next(p.name for p in self.phases if not p.data)}' has none" if names else ""
            raise ValueError(f"found no data{lacking}; name the corpora, for example data = {{ clean = 1.0 }}")
        if self.data is not None and names and len(own_data) == len(names):
            raise ValueError("found data beside phases that all have their own, so nobody reads it; leave it out")
        shares = [p.share for p in self.phases if p.share is not None]
        if shares and len(shares) < len(names):
            raise ValueError("found phases with a share and phases with a duration, expected one kind; convert some")
        if shares and abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"the shares of the phases add up to {sum(shares):g}, expected 1; change one of them")
        if self.duration is None and (shares or not names):
            raise ValueError('found no duration, expected one such as "5000 steps", "3M tokens" or "20 tokens/param"')
        if self.duration is not None and names and not shares:
            raise ValueError("found duration beside phases that all have their own; leave it out, or give them shares")
        batches = [b for b in (self.batch, *(p.batch for p in self.phases)) if b is not None]
        fewest = OBJECTIVES[self.objective.kind].smallest_batch
        if small := [n for b in batches if (n := b if isinstance(b, int) else b.start) < fewest]:
            raise ValueError(
                f"found objective {self.objective.kind} with a batch of {small[0]}, expected {fewest} or more: a step "
                "needs another prompt"
            )
        for phase in self.phases:
            phase.curve(self.optim, first=False, lr=self.optim.lr or 1.0)  # says what does not fit together
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> "TrainSettings":
        if self.init and self.tokenizer:
            raise ValueError(
                f"found both init = '{self.init}' and a tokenizer, expected one: the tokenizer comes with init"
            )
        if self.init and self.model:
            raise ValueError(f"found both init = '{self.init}' and a model, expected one: the shape comes with init")
        if not self.init and self.context:
            raise ValueError(
                f"found context = {self.context} without init; write model = {{ context = {self.context} }}"
            )
        if self.adapter and not self.init:
            raise ValueError("found adapter without init, expected a trained model to adapt; name its stage in init")
        if not self.init and not self.tokenizer:
            raise ValueError("found neither init nor tokenizer; name the tokenizer stage (or the stage to start from)")
        self.companions()
        return self
