"""Settings of the kind `train`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_validator,
)

from ingot.core.errors import UserError, nearest
from ingot.core.settings import EXECUTION, STAGE, Seed, Settings, Stage
from ingot.data.mixtures import expanded
from ingot.data.settings import PackingSettings
from ingot.model.adapter_config import ADAPTER, AdapterSettings, check_dropout
from ingot.model.config import ModelSettings
from ingot.objectives.settings import OBJECTIVES, LanguageModelSettings, ObjectiveSettings
from ingot.optim.settings import OptimSettings, ScheduleKind
from ingot.stages.training.initial_layers import InitLayers
from ingot.train.duration import Duration
from ingot.train.penalty_settings import ANCHORS, EwcSettings, PenaltySettings
from ingot.train.settings import EvaluateSettings, LoopSettings, MeshSettings, Precision


def _check_duration(text: str) -> str:
    Duration.parse(text)
    return text


def _check_mixture(data: dict[str, float]) -> dict[str, float]:
    if not data:
        raise ValueError("found no corpus, expected at least one, for example { clean = 1.0 }")
    for name, fraction in data.items():
        if fraction <= 0:
            raise ValueError(f"found {name} = {fraction}, expected a fraction above 0; leave the corpus out instead")
    return data


DurationText = Annotated[str, AfterValidator(_check_duration)]
"""A duration: "5000 steps", "3M tokens", "1 epoch", "20 tokens/param"."""
Mixture = Annotated[dict[str, float], BeforeValidator(expanded), AfterValidator(_check_mixture)]
"""Corpus -> its fraction of the tokens, on any positive scale; or a published mixture by name (`data/mixtures.py`)."""


def _penalties_in(table: Mapping[str, Any]) -> list[Any]:
    """The penalties of a table that has not been validated."""
    penalties = table.get("penalties", ())
    return list(penalties) if isinstance(penalties, list | tuple) else []


class RampSettings(Settings):
    """`batch = { from = 16, to = 1600, over = "12B tokens" }`: a batch size that grows linearly and then stays."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    start: int = Field(alias="from", ge=1)
    """Rows of the first step (written `from` in a recipe)."""
    to: int = Field(ge=2)
    """Rows of a step at the end of the ramp and after it."""
    over: DurationText
    """Length of the ramp: "12B tokens" grows with the tokens seen, "500 steps" with the steps."""

    @model_validator(mode="after")
    def _grows(self) -> "RampSettings":
        if self.to <= self.start:
            raise ValueError(
                f"found from = {self.start} and to = {self.to}, expected a batch that grows; "
                f"write batch = {self.to} for one that does not"
            )
        return self


RowLength = Annotated[int, Field(ge=2)]
"""Tokens of a row; at least 2, one input and one target."""

RowOrder = Literal["shuffled", "stored"]
"""Order of a corpus's rows within an epoch."""


def _batch_tag(value: Any) -> str:
    return "Ramp" if isinstance(value, Mapping | RampSettings) else "Rows"


RowsPerUpdate = Annotated[
    Annotated[PositiveInt, Tag("Rows")] | Annotated[RampSettings, Tag("Ramp")],
    Discriminator(_batch_tag),
]
"""Rows of an optimizer step: a number, or a ramp."""


class PhaseSettings(Settings):
    """`[[stage.base.phases]]`: a phase of a stage's steps. A setting that is left out has the stage's value."""

    RENAMED: ClassVar = {"share": "fraction"}

    name: Annotated[str, EXECUTION] = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$")
    """Name of the phase in logs and `ingot status`."""
    fraction: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the stage's duration; the fractions of all phases add up to 1."""
    duration: DurationText | None = None
    """Duration of the phase, instead of a fraction."""
    data: Annotated[Mixture | None, STAGE] = None
    """Mixture of the phase."""
    order: RowOrder | None = None
    """Order of the rows of each corpus; default: the stage's."""
    context: RowLength | None = None
    """Tokens of the phase's rows; the model's context is the largest of all phases."""
    batch: RowsPerUpdate | None = None
    """Rows of an optimizer step. A phase's ramp begins with the phase; a stage's ramp continues across phases."""
    lr: float | None = Field(default=None, gt=0)
    """Peak of the phase's own learning-rate curve; default: the rate at the end of the previous phase."""
    schedule: ScheduleKind | None = None
    """Shape of the phase's own curve after warmup, which ends with the phase."""
    warmup: float | None = Field(default=None, ge=0)
    """Steps (below 1: fraction of the phase) from the rate of the previous phase to the peak; default: none."""
    min_ratio: float | None = Field(default=None, ge=0, le=1)
    """Floor of the phase's curve as a fraction of its peak."""

    @property
    def has_curve(self) -> bool:
        """Whether the phase has a learning-rate curve of its own; otherwise the stage's curve continues."""
        return any(v is not None for v in (self.lr, self.schedule, self.warmup, self.min_ratio))

    def curve(self, optim: OptimSettings, first: bool, lr: float | None) -> OptimSettings:
        """Settings of the phase's own learning-rate curve.

        Args:
            optim: settings of the stage, for what the phase leaves out.
            first: whether it is the first phase, which has the stage's warmup by default; a later one has none.
            lr: the rate at the end of the previous phase, if there is one.
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
        if (self.fraction is None) == (self.duration is None):
            given = "neither" if self.fraction is None else "both"
            raise ValueError(f"found {given} of fraction and duration in phase '{self.name}', expected exactly one")
        return self


class TrainSettings(Settings):
    """`kind = "train"`: pretraining, fine-tuning, and every other objective."""

    data: Annotated[Mixture | None, STAGE] = None
    """Corpus stage -> its fraction of the tokens, for example { clean = 0.9, questions = 0.1 }; left out where every
    phase has its own."""
    duration: DurationText | None = None
    """Length of training: "5000 steps", "3M tokens", "1 epoch" or "20 tokens/param"; left out where every phase has its
    own."""
    phases: tuple[PhaseSettings, ...] = ()
    """Phases of the duration, each with its own mixture, context, batch size or learning rate."""
    order: RowOrder = "shuffled"
    """`shuffled` anew in each epoch; or as `stored`, such as in the order of a score (`sort` of a select stage)."""
    temperature: float | None = Field(default=None, gt=0)
    """Multiply the fractions of `data` by size^(1 / temperature), sizes in tokens: 1 mixes by size, a large one as
    `data` says. Default: as `data` says."""
    max_epochs: Annotated[dict[str, float], Stage(divided=False)] = Field(default_factory=dict)
    """Corpus -> how often its rows are used at most in the stage. Its fraction is lowered so far that it lasts; the
    others share the rest in proportion."""
    tokenizer: Annotated[str | None, Stage("tokenizer")] = None
    """Tokenizer stage; left out with `init`, whose tokenizer is used."""
    init: Annotated[str | None, Stage("model")] = None
    """Initial model: a train or import stage, `hf:DIR`, or the directory of another run's train stage; default: random
    weights."""
    init_layers: InitLayers | None = None
    """Start with some layers of the model of `init`, a student of its own teacher: their numbers [0, 2], or how many
    evenly spaced ones. Default: all."""
    model: ModelSettings | None = None
    """Shape of a model with random weights."""
    context: RowLength | None = None
    """Tokens of a row, for a model of `init`; default: the model's context."""
    batch: RowsPerUpdate | None = None
    """Rows of `context` tokens in an optimizer step: a number, or a ramp { from = 16, to = 1600, over = "12B tokens" }.
    Default: 512 x depth^2 tokens, or fewer if a duration in tokens or epochs would make fewer than 100 updates."""
    adapter: Annotated[AdapterSettings | None, ADAPTER] = None
    """Train an adapter and freeze the model of `init`: { kind = "lora", rank = 16 }, or "lora" for short. Stages that
    use this one get the merged model."""
    objective: ObjectiveSettings = LanguageModelSettings()
    """The training objective."""
    penalties: tuple[PenaltySettings, ...] = ()
    """Penalties against forgetting: { kind = "ewc", fisher = "STAGE", weight = 100 }, { kind = "l2sp", weight = 0.01 },
    { kind = "kl", reference = "STAGE", weight = 0.1 }. With ewc or l2sp there is no weight decay."""
    packing: PackingSettings = PackingSettings()
    """How documents are packed into rows."""
    optim: OptimSettings = OptimSettings()
    """Optimizer and schedule."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation during training."""
    guard: bool = True
    """Skip updates that would do damage; go back to a checkpoint if they do not end, or if a bit flipped in memory."""
    precision: Precision = "auto"
    """Of the forward and backward pass: fp32, tf32, bf16, fp16, fp64, or auto. Weights are fp32 (fp64 with `fp64`)."""
    seed: Seed | None = None
    """Overrides [run] seed for this stage."""
    loop: LoopSettings = LoopSettings()
    """Execution settings; none of them changes the result."""
    mesh: MeshSettings = MeshSettings()
    """How several processes share the work: { shard = 4 } holds the model in 4 parts. Default: each holds it whole."""

    @property
    def corpora(self) -> list[str]:
        """All corpora of all phases."""
        return list(dict.fromkeys(name for phase in self.phases_or_default for name in self.mixture(phase)))

    @property
    def phases_or_default(self) -> tuple[PhaseSettings, ...]:
        """The phases; without any, a single phase `all`."""
        return self.phases or (PhaseSettings(name="all", fraction=1.0),)

    def mixture(self, phase: PhaseSettings) -> Mapping[str, float]:
        """The mixture of a phase: its own, or the stage's."""
        return phase.data or self.data or {}

    def is_shuffled(self, phase: PhaseSettings) -> bool:
        """Whether a phase shuffles its rows."""
        return (phase.order or self.order) == "shuffled"

    def context_of(self, phase: PhaseSettings, initial: int) -> int:
        """Tokens of a phase's rows: its own setting, the stage's, or the context of the initial model."""
        return phase.context or self.context or initial

    def trained_context(self, initial: int, limit: int) -> int:
        """Context of the trained model: the longest rows, and at least the context of `init`.

        Args:
            initial: context of the initial model.
            limit: longest context that it may be extended to, if it is trained already (`max_context`).

        Raises UserError if rows are longer than the model of `init` was made for.
        """
        longest = max(self.context_of(phase, initial) for phase in self.phases_or_default)
        if self.init and longest > limit:
            raise UserError(
                f"context: found {longest:,}, expected at most {limit:,}, which '{self.init}' was made for; lower it, "
                "or start from a model with a longer context or with rope_scaling"
            )
        return max(longest, initial) if self.init else longest

    def companions(self) -> dict[str, str]:
        """Role -> stage of every frozen model that the objective and the penalties need.

        Where they name no stage for a role (None), it is the stage in `init`.

        Raises:
            ValueError: there is neither.
        """
        stages: dict[str, str] = {}
        for name, part in (("objective", self.objective), *(("penalties", penalty) for penalty in self.penalties)):
            for role, stage in part.companions().items():
                if stage is None and self.init is None:
                    raise ValueError(f"found no {role} in {name} and no init, expected one; name a trained stage")
                stages[role] = stage or self.init or ""
        return stages

    @property
    def fishers(self) -> list[str]:
        """Fisher stages of the penalties."""
        return [p.fisher for p in self.penalties if isinstance(p, EwcSettings)]

    @property
    def penalty_names(self) -> list[str]:
        """Name of each penalty in logs: penalty/KIND, followed by its stage where there are several of a kind."""
        kinds = [p.kind for p in self.penalties]
        stages = ["" if kinds.count(p.kind) == 1 else f"/{p.stage or 'init'}" for p in self.penalties]
        return [f"penalty/{kind}{stage}" for kind, stage in zip(kinds, stages, strict=True)]

    @model_validator(mode="before")
    @classmethod
    def _no_decay_beside_an_anchor(cls, table: Any) -> Any:
        """Set weight decay to 0 by default beside an anchor, because the two pull weights to different values."""
        if not isinstance(table, Mapping):
            return table
        kinds = [p.get("kind") if isinstance(p, Mapping) else getattr(p, "kind", None) for p in _penalties_in(table)]
        optim = table.get("optim", {})
        if isinstance(optim, Mapping) and any(kind in ANCHORS for kind in kinds):
            return {**table, "optim": {"weight_decay": 0.0, **optim}}
        return table

    @model_validator(mode="after")
    def _anchored(self) -> "TrainSettings":
        anchors = [p.kind for p in self.penalties if p.kind in ANCHORS]
        if anchors and self.optim.weight_decay:
            raise ValueError(
                f"found optim.weight_decay = {self.optim.weight_decay:g} beside the penalty {anchors[0]}, expected 0, "
                "because decay pulls weights to zero and the penalty to their old values; leave weight_decay out"
            )
        if twice := [n for n in dict.fromkeys(self.penalty_names) if self.penalty_names.count(n) > 1]:
            raise ValueError(f"found {twice[0]} twice, expected once; add up their weights")
        if not self.init and any(p.kind == "l2sp" or (p.kind == "kl" and not p.reference) for p in self.penalties):
            raise ValueError("found a penalty that refers to init, and no init; name the stage to start from")
        return self

    @model_validator(mode="after")
    def _complete(self) -> "TrainSettings":
        """Check that every step belongs to one phase and has a mixture, a duration and a sufficient batch."""
        names = [p.name for p in self.phases]
        if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
            raise ValueError(f"found more than one phase named '{twice[0]}', expected different names")
        own_data = [p.name for p in self.phases if p.data]
        if self.data is None and (not names or len(own_data) < len(names)):
            missing = f" and phase '{next(p.name for p in self.phases if not p.data)}' has none" if names else ""
            raise ValueError(f"found no data{missing}; name the corpora, for example data = {{ clean = 1.0 }}")
        if self.data is not None and names and len(own_data) == len(names):
            raise ValueError("found data beside phases that all have their own, so it is not used; leave it out")
        for name, most in self.max_epochs.items():
            if name not in self.corpora:
                raise ValueError(f"found max_epochs of '{name}', which no mixture has; {nearest(name, self.corpora)}")
            if most <= 0:
                raise ValueError(
                    f"found max_epochs.{name} = {most}, expected more than 0; leave the corpus out instead"
                )
        fractions = [p.fraction for p in self.phases if p.fraction is not None]
        if fractions and len(fractions) < len(names):
            raise ValueError(
                "found phases with a fraction and phases with a duration, expected one of them; convert some"
            )
        if fractions and abs(sum(fractions) - 1) > 1e-6:
            raise ValueError(
                f"the fractions of the phases add up to {sum(fractions):g}, expected 1; change one of them"
            )
        if self.duration is None and (fractions or not names):
            raise ValueError('found no duration, expected one such as "5000 steps", "3M tokens" or "20 tokens/param"')
        if self.duration is not None and names and not fractions:
            raise ValueError(
                "found duration beside phases that all have their own; leave it out, or give them fractions"
            )
        batches = [b for b in (self.batch, *(p.batch for p in self.phases)) if b is not None]
        min_batch = OBJECTIVES[self.objective.kind].smallest_batch
        if small := [n for b in batches if (n := b if isinstance(b, int) else b.start) < min_batch]:
            raise ValueError(
                f"found objective {self.objective.kind} with a batch of {small[0]}, expected {min_batch} or more; "
                "raise batch"
            )
        for phase in self.phases:
            phase.curve(self.optim, first=False, lr=self.optim.lr or 1.0)  # validates the combination
        return self

    @model_validator(mode="after")
    def _backend_can(self) -> "TrainSettings":
        """Check that the backend returns what the loss reads inside the model, and reads parts of a model."""
        layers = self.objective.reads_layers
        if self.loop.backend in ("cpu", "compiled") and (layers or self.mesh.shard != 1):
            what = 'features or relations of layers, which only "torch" hands out'
            what = what if layers else 'mesh.shard, whose parts only "torch" reads'
            raise ValueError(f'found loop.backend = "{self.loop.backend}" with {what}; leave backend out')
        return self

    @model_validator(mode="after")
    def _runs_in_parts(self) -> "TrainSettings":
        """Check that what is set works on parts of a model."""
        if self.mesh.shard == 1:
            return self
        if self.optim.state == "8bit":
            raise ValueError(
                "found optim.state = '8bit' with mesh.shard, whose parts cut blocks of 256 elements; use state = 'bf16'"
            )
        if self.adapter and (anchors := [p.kind for p in self.penalties if p.kind in ANCHORS]):
            raise ValueError(
                f"found the penalty {anchors[0]} on an adapter with mesh.shard, which does not hold merged weights in "
                "parts; leave shard out, which replicates the model"
            )
        return self

    @model_validator(mode="after")
    def _one_initial_model(self) -> "TrainSettings":
        if self.init and self.tokenizer:
            raise ValueError(
                f"found both init = '{self.init}' and a tokenizer, expected one: the tokenizer comes with init"
            )
        if self.init and self.model:
            raise ValueError(f"found both init = '{self.init}' and a model, expected one: the shape comes with init")
        if self.init_layers is not None and (self.adapter or not self.init):
            other = "with an adapter" if self.adapter else "without init"
            raise ValueError(f"found init_layers {other}, expected a trained model in init, and no adapter on it")
        if not self.init and self.context:
            raise ValueError(
                f"found context = {self.context} without init; write model = {{ context = {self.context} }}"
            )
        if self.adapter and not self.init:
            raise ValueError("found adapter without init, expected a trained model to adapt; name its stage in init")
        if not self.init and not (self.tokenizer and self.model):
            missing = "model; give its shape, model = { depth = 4 }" if self.tokenizer else "tokenizer; name its stage"
            raise ValueError(f"found neither init nor {missing} (or name the stage to start from in init)")
        check_dropout(self.adapter, self.objective.has_dropout)
        self.companions()
        return self
