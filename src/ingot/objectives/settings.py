"""The objectives a recipe may name: their settings, apart from their code so that a recipe is read without torch.

Adding one is a file in this room and a line in `OBJECTIVES` (with a settings class above it where it has settings).
"""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from ingot.core.settings import Stage
from ingot.objectives.base_settings import MethodSettings
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings


class LanguageModelSettings(MethodSettings):
    """`objective = { kind = "lm" }`, the default: next-token prediction over every labelled target."""

    kind: Literal["lm"] = "lm"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target spread evenly over the vocabulary; trained on, and no part of the reported loss."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of ln(Z)^2 per token, which keeps logits from drifting (PaLM: 1e-4); no part of the reported loss."""


class RewardSettings(MethodSettings):
    """`objective = { kind = "reward" }`: a reward model from pairs (Bradley-Terry)."""

    kind: Literal["reward"] = "reward"
    margin: float = Field(default=0.0, ge=0)
    """How far apart the rewards of the chosen and the rejected answer are wanted."""
    centering: float = Field(default=0.01, ge=0)
    """Weight of (r_w + r_l)^2, which holds the rewards around 0; no part of the reported loss."""


class PreferenceSettings(MethodSettings):
    """`objective = { kind = "dpo", beta = 0.1 }`: learning from pairs without a reward model."""

    kind: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "cpo"] = "sigmoid"
    """`sigmoid` is DPO (with `label_smoothing` the conservative one); simpo, orpo and cpo need no reference."""
    beta: float | None = Field(default=None, gt=0)
    """How much a difference between the answers counts, the pull to the reference. Default: 0.1, of simpo 2."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs taken to be labelled the wrong way round (sigmoid, robust)."""
    gamma: float = Field(default=0.0, ge=0)
    """How far apart simpo wants the two rewards."""
    length_norm: bool | None = None
    """Whether an answer's score is divided by its tokens, as simpo's and orpo's always is; default: of ipo alone, as
    its authors do."""
    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the chosen answer's own loss a token (RPO), which keeps its probability from falling; no part of the
    reported loss. Default: 1 for orpo and cpo, else 0."""
    reference: Annotated[str | None, Stage("model")] = None
    """The frozen model that the policy is held to: a stage. Default: what this stage starts from."""

    def companions(self) -> dict[str, str | None]:
        return {} if self.loss in REFERENCE_FREE else {"reference": self.reference}

    @model_validator(mode="after")
    def _fitting(self) -> "PreferenceSettings":
        """Nothing is set that this loss would not read."""
        free = self.loss in REFERENCE_FREE
        for name, fits, which in (
            ("label_smoothing", self.loss in ("sigmoid", "robust"), "sigmoid and robust"),
            ("gamma", self.loss == "simpo", "simpo"),
            ("reference", not free, "losses with a reference"),
            ("length_norm", not free, "losses with a reference"),
        ):
            if getattr(self, name) != type(self).model_fields[name].default and not fits:
                raise ValueError(f'found {name} with loss = "{self.loss}", expected it with {which}; leave it out')
        return self


class UnpairedSettings(MethodSettings):
    """`objective = { kind = "kto" }`: answers that were liked or not, each by itself."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """How much an answer's ratio to the reference counts."""
    desirable: float = Field(default=1.0, ge=0)
    """Weight of chosen answers."""
    undesirable: float = Field(default=1.0, ge=0)
    """Weight of rejected answers."""
    reference: Annotated[str | None, Stage("model")] = None
    """The frozen model that the policy is held to: a stage. Default: what this stage starts from."""

    def companions(self) -> dict[str, str | None]:
        return {"reference": self.reference}


REFERENCE_FREE = ("simpo", "orpo", "cpo")
"""Preference losses that compare the policy with itself alone."""


@dataclass(frozen=True)
class Entry:
    """An objective's settings, and its class as `module:name`, imported where it is built from the settings."""

    settings: type[MethodSettings]
    builder: str
    formats: tuple[str, ...] = ("text", "chat")
    """Formats of the corpora that it learns from."""
    scores: bool = False
    """Whether a finished stage of it scores rows: a reward model."""
    smallest_batch: int = 1
    """Rows that a step needs at least, as they are drawn."""

    @property
    def samples(self) -> bool:
        """Whether it learns from its own samples."""
        return "prompts" in self.formats


def plain(kind: str, base: type[MethodSettings] = MethodSettings) -> type[MethodSettings]:
    """Settings of an objective that has none but its kind and those of `base`."""
    return create_model(f"{kind}_settings", __base__=base, kind=(Literal[kind], kind))  # pyright: ignore


OBJECTIVES: dict[str, Entry] = {
    "lm": Entry(LanguageModelSettings, "ingot.objectives.lm:LanguageModel"),
    "reward": Entry(RewardSettings, "ingot.objectives.reward:Reward", ("pairs",), scores=True),
    "dpo": Entry(PreferenceSettings, "ingot.objectives.preference:Preference", ("pairs",)),
    "kto": Entry(UnpairedSettings, "ingot.objectives.preference:Unpaired", ("pairs",), smallest_batch=2),
    "ppo": Entry(PPOSettings, "ingot.objectives.ppo:PPO", ("prompts",)),
    "grpo": Entry(GRPOSettings, "ingot.objectives.grpo:GRPO", ("prompts",)),
}


def scores_rows(settings: Any) -> bool:
    """Whether a stage of these settings (a model, or its table) is a reward model."""
    objective = settings.get("objective") if isinstance(settings, Mapping) else getattr(settings, "objective", None)
    kind = objective.get("kind") if isinstance(objective, Mapping) else getattr(objective, "kind", None)
    return kind in OBJECTIVES and OBJECTIVES[kind].scores


def _named(value: Any) -> Any:
    """`objective = "dpo"` is short for `{ kind = "dpo" }`, and a table without a kind is next-token prediction's."""
    if isinstance(value, Mapping):
        return {"kind": "lm", **value}
    return {"kind": value} if isinstance(value, str) else value


def _any_of(members: list[type[MethodSettings]]) -> Any:
    union: Any = functools.reduce(operator.or_, members)
    return Annotated[union, Field(discriminator="kind")] if len(members) > 1 else union


ObjectiveSettings = Annotated[_any_of([e.settings for e in OBJECTIVES.values()]), BeforeValidator(_named)]
"""The type of a recipe's `objective`."""
