"""Settings of all objectives, separate from their code so that a recipe is parsed without torch.

A new objective needs a file in this package and an entry in `OBJECTIVES`; see docs/extending.md.
"""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from ingot.objectives.base_settings import Companion, MethodSettings
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings


class LanguageModelSettings(MethodSettings):
    """`objective = { kind = "lm" }`, the default: next-token prediction over every labelled target."""

    kind: Literal["lm"] = "lm"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the target that is spread evenly over the vocabulary; not part of the reported loss."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of ln(Z)^2 per token, which keeps logits from drifting (PaLM: 1e-4); not part of the reported loss."""


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

    def companions(self) -> dict[str, str | None]:
        return {} if self.loss in REFERENCE_FREE else super().companions()

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
