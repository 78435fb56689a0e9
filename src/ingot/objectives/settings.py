"""Settings of all objectives, separate from their code so that a recipe is parsed without torch.

A new objective needs a file in this package and an entry in `OBJECTIVES`; see docs/extending.md.
"""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from ingot.core.errors import UserError
from ingot.core.settings import Stage
from ingot.objectives.base_settings import Companion, MethodSettings
from ingot.objectives.layer_settings import FeatureSettings, RelationSettings, layer_map
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings


class LanguageModelSettings(MethodSettings):
    """`objective = { kind = "lm" }`, the default: next-token prediction over every labelled target."""

    kind: Literal["lm"] = "lm"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the target that is spread evenly over the vocabulary; not part of the reported loss."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of ln(Z)^2 per token, which keeps logits from drifting (PaLM: 1e-4); not part of the reported loss."""

    @property
    def penalized(self) -> bool:
        """Whether the loss has more than cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


class RewardSettings(MethodSettings):
    """`objective = { kind = "reward" }`: a reward model from pairs (Bradley-Terry)."""

    kind: Literal["reward"] = "reward"
    margin: float = Field(default=0.0, ge=0)
    """Margin subtracted from r_chosen - r_rejected in the loss."""
    centering: float = Field(default=0.01, ge=0)
    """Weight of (r_chosen + r_rejected)^2, which keeps rewards centred at 0; not part of the reported loss."""


class PreferenceSettings(MethodSettings):
    """`objective = { kind = "dpo", beta = 0.1 }`: preference learning from pairs, without a reward model."""

    kind: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "cpo"] = "sigmoid"
    """`sigmoid` is DPO (conservative DPO with `label_smoothing`); simpo, orpo and cpo need no reference."""
    beta: float | None = Field(default=None, gt=0)
    """Scale of the score difference; a larger beta stays closer to the reference. Default: 0.1; for simpo 2."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Fraction of pairs that are assumed to be labelled the wrong way round (sigmoid, robust)."""
    gamma: float = Field(default=0.0, ge=0)
    """Target margin between the rewards of the two answers (simpo)."""
    length_norm: bool | None = None
    """Whether an answer's score is divided by its number of tokens. Default: for ipo only; simpo and orpo always do."""
    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the chosen answer's mean loss per token (RPO), which keeps its probability from falling; not part of
    the reported loss. Default: 1 for orpo and cpo, else 0."""
    reference: Companion = None
    """Stage of the frozen reference model. Default: `init`."""

    @property
    def has_dropout(self) -> bool:
        return False

    def companions(self) -> dict[str, str | None]:
        return {} if self.loss in REFERENCE_FREE else super().companions()

    @property
    def releases_companions(self) -> bool:
        return True

    @model_validator(mode="after")
    def _all_settings_apply(self) -> "PreferenceSettings":
        """Reject settings that the chosen loss does not use."""
        free = self.loss in REFERENCE_FREE
        for name, applies, losses in (
            ("label_smoothing", self.loss in ("sigmoid", "robust"), "sigmoid and robust"),
            ("gamma", self.loss == "simpo", "simpo"),
            ("reference", not free, "losses with a reference"),
            ("length_norm", not free, "losses with a reference"),
        ):
            if getattr(self, name) != type(self).model_fields[name].default and not applies:
                raise ValueError(f'found {name} with loss = "{self.loss}", expected it with {losses}; leave it out')
        return self


class UnpairedSettings(MethodSettings):
    """`objective = { kind = "kto" }`: a loss per answer, desirable or undesirable."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """Scale of an answer's log ratio to the reference; a larger beta stays closer to the reference."""
    desirable: float = Field(default=1.0, ge=0)
    """Weight of chosen answers."""
    undesirable: float = Field(default=1.0, ge=0)
    """Weight of rejected answers."""
    reference: Companion = None
    """Stage of the frozen reference model. Default: `init`."""

    @property
    def has_dropout(self) -> bool:
        return False


Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""Of a softmax that is distilled. At 0.01 only the most likely token has any probability. At 100, T^2 D is a difference
of nearly equal numbers and wrong by 1 % in fp32; at 300 by 20 %."""


class TeacherSettings(MethodSettings):
    """Settings of the objectives that learn from a teacher's distributions.

    The loss of a token is alpha (-ln p(label)) + (1 - alpha) T^2 D(teacher, student), both distributions at temperature
    T. The reported loss is -ln p(label) as with `lm`, so that students with and without a teacher can be compared.
    """

    teacher: Annotated[str, Stage("model")]
    """The frozen teacher: a train or import stage, which runs beside the student, or an annotate stage, which has
    stored the predictions of one."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Weight of the labels; 1 is `lm`, 0 learns from the teacher alone."""
    temperature: Temperature = 1.0
    """T, above 1 the teacher's less likely tokens count more; below 0.01 only the most likely token would have any
    probability, and above 100 fp32 would round the divergence away."""
    divergence: Literal["forward", "reverse", "jsd", "skew"] = "forward"
    """D: KL(teacher, student), KL(student, teacher), generalised Jensen-Shannon, or KL(teacher, mixture)."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """Weight of the teacher in the mixture of jsd (default 0.5) and skew (default 0.1)."""

    @property
    def stored_temperature(self) -> float | None:
        return self.temperature

    @model_validator(mode="after")
    def _beta_applies(self) -> "TeacherSettings":
        if self.beta is not None and self.divergence not in MIXTURE_WEIGHTS:
            raise ValueError(
                f'found beta with divergence = "{self.divergence}", expected it with {" and ".join(MIXTURE_WEIGHTS)}; '
                "leave it out"
            )
        return self


class DistillSettings(TeacherSettings):
    """`objective = { kind = "distill", teacher = "large" }`: next-token prediction with a teacher's distributions."""

    kind: Literal["distill"] = "distill"
    features: FeatureSettings | None = None
    """Learn the states of layers of a teacher that runs beside the student."""
    relations: RelationSettings | None = None
    """Learn how tokens relate to each other in layers of a teacher that runs beside the student."""

    @property
    def reads_layers(self) -> bool:
        return bool(self.features or self.relations)

    def layer_maps(self, student: int, teacher: int) -> tuple[dict[int, int], dict[int, int]]:
        """The maps of features and of relations: layer of the student -> layer of the teacher.

        Args:
            student, teacher: number of blocks.

        Raises:
            UserError: a layer is not there.
        """
        features, relations = (
            layer_map(f"objective.{name}.layers", part.layers, student, teacher, first) if part else {}
            for name, part, first in (("features", self.features, 0), ("relations", self.relations, 1))
        )
        return features, relations


class GKDSettings(TeacherSettings):
    """`objective = { kind = "gkd", teacher = "large" }`: distillation, with steps on samples of the student.

    The teacher corrects every token that the student has written itself (Agarwal et al. 2023, arXiv:2306.13649).
    """

    kind: Literal["gkd"] = "gkd"
    on_policy: float = Field(default=0.5, ge=0, le=1)
    """Fraction of the steps that train on samples of the student, GKD's lambda; 0 is `distill`."""
    ramp: int = Field(default=0, ge=0)
    """Steps over which that fraction grows from 0: the first samples of a new student are noise."""
    max_new: int = Field(default=128, ge=1)
    """Longest sample in tokens."""
    prompt: int = Field(default=16, ge=1)
    """Tokens that a sample continues, of running text; of a conversation, all before its first answer."""
    sample_temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling."""

    @property
    def stored_temperature(self) -> float | None:
        return None  # nothing is stored for what the student will write

    @property
    def max_completion_tokens(self) -> int:
        return self.max_new if self.on_policy else 0

    def max_prompt_tokens(self, context: int) -> int:
        longest = super().max_prompt_tokens(context)
        if self.on_policy and self.prompt > longest:
            raise UserError(
                f"objective.prompt: found {self.prompt:,}, expected at most {longest:,}, which the context of "
                f"{context:,} has beside max_new = {self.max_new:,}; lower one of them, or set a longer context"
            )
        return longest


MIXTURE_WEIGHTS = {"jsd": 0.5, "skew": 0.1}
"""Default `beta` of the divergences from a mixture."""
REFERENCE_FREE = ("simpo", "orpo", "cpo")
"""Preference losses without a reference model."""


@dataclass(frozen=True)
class Entry:
    """An objective: its settings, and its class as `module:name`, imported only when it is built."""

    settings: type[MethodSettings]
    builder: str
    formats: tuple[str, ...] = ("text", "chat")
    """Formats of the corpora that it trains on."""
    scores: bool = False
    """Whether its trained model is a reward model, which scores rows."""
    smallest_batch: int = 1
    """Fewest rows of a step, before they are expanded to pairs or samples."""

    @property
    def on_policy(self) -> bool:
        """Whether it trains on samples of its own policy."""
        return "prompts" in self.formats


def plain(kind: str, base: type[MethodSettings] = MethodSettings, **fields: tuple[Any, Any]) -> type[MethodSettings]:
    """Settings without a class of their own: those of `base`, and further fields as name = (type, default)."""
    return create_model(f"{kind}_settings", __base__=base, kind=(Literal[kind], kind), **fields)  # pyright: ignore


OBJECTIVES: dict[str, Entry] = {
    "lm": Entry(LanguageModelSettings, "ingot.objectives.lm:LanguageModel"),
    "distill": Entry(DistillSettings, "ingot.objectives.distill:Distill"),
    "gkd": Entry(GKDSettings, "ingot.objectives.gkd:GKD"),
    "reward": Entry(RewardSettings, "ingot.objectives.reward:Reward", ("pairs",), scores=True),
    "dpo": Entry(PreferenceSettings, "ingot.objectives.preference:Preference", ("pairs",)),
    "kto": Entry(UnpairedSettings, "ingot.objectives.preference:Unpaired", ("pairs",), smallest_batch=2),
    "ppo": Entry(PPOSettings, "ingot.objectives.ppo:PPO", ("prompts",)),
    "grpo": Entry(GRPOSettings, "ingot.objectives.grpo:GRPO", ("prompts",)),
}


def scores_rows(settings: Any) -> bool:
    """Whether a stage with these settings (a `Settings` object or its table) trains a reward model."""
    objective = settings.get("objective") if isinstance(settings, Mapping) else getattr(settings, "objective", None)
    kind = objective.get("kind") if isinstance(objective, Mapping) else getattr(objective, "kind", None)
    return kind in OBJECTIVES and OBJECTIVES[kind].scores


def _as_table(value: Any) -> Any:
    """Expand `objective = "dpo"` to `{ kind = "dpo" }`; a table without a kind gets `lm`."""
    if isinstance(value, Mapping):
        return {"kind": "lm", **value}
    return {"kind": value} if isinstance(value, str) else value


def _discriminated_union(members: list[type[MethodSettings]]) -> Any:
    union: Any = functools.reduce(operator.or_, members)
    return Annotated[union, Field(discriminator="kind")] if len(members) > 1 else union


ObjectiveSettings = Annotated[
    _discriminated_union([e.settings for e in OBJECTIVES.values()]), BeforeValidator(_as_table)
]
"""The type of a recipe's `objective`."""
