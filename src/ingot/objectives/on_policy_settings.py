"""Settings of the on-policy objectives, ppo and grpo. No torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.core.functions import function_files, is_function
from ingot.core.settings import Stage
from ingot.objectives.base_settings import MethodSettings

KLName = Literal["k1-reward", "k2-reward", "k3-reward", "k1-loss", "k2-loss", "k3-loss", "k3-ratio-loss"]
"""Estimator of the KL divergence from the reference, and whether it enters the reward or the loss; see `policy.KLS`."""


class OnPolicySettings(MethodSettings):
    """Settings of both `ppo` and `grpo`."""

    reward: Annotated[str, Stage("model")] = Field(min_length=1)
    """Scores completions: a train stage with objective `reward`, or `"file.py:function"`, called with a list of
    prompts (tables with `prompt` and the other fields of their row) and a list of completions; it returns a number for
    each, or None for one that it cannot score."""
    gold: Annotated[str | None, Stage("model")] = Field(default=None, min_length=1)
    """A more trusted reward, if there is one: another such stage or function. It is never trained on, only logged as
    `gold_reward`, so that the report can warn when the policy games the reward."""
    reference: Annotated[str | None, Stage("model")] = None
    """Stage whose model the KL penalty compares the policy with; default: `init`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference, in reward per nat; 0 needs no reference."""
    kl: KLName = "k1-reward"
    """Estimator of that divergence, and whether it enters the reward or the loss. Only k1-reward, k2-loss and
    k3-ratio-loss optimise KL(policy || reference)."""
    max_new: int = Field(default=128, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling and of the trained policy: every forward pass divides its logits by it."""
    epochs: int = Field(default=1, ge=1)
    """How often each step trains on its completions."""
    minibatches: int = Field(default=1, ge=1)
    """Updates per epoch, each on a different subset of the completions."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """Ratios of policy to sampling policy below 1 - clip get no gradient if their advantage is negative."""
    clip_high: float | None = Field(default=None, gt=0)
    """Ratios above 1 + clip_high get no gradient if their advantage is positive; default: `clip`. DAPO uses 0.28."""
    no_stop_reward: float | None = None
    """Reward of a completion without a stop token, in place of its score (OpenAI: -1); default: its score."""

    @property
    def has_dropout(self) -> bool:
        return False

    def companions(self) -> dict[str, str | None]:
        reference: dict[str, str | None] = {"reference": self.reference} if self.uses_reference else {}
        return reference | {role: name for role, name in self._scorers() if not is_function(name)}

    @property
    def scoring_roles(self) -> frozenset[str]:
        return frozenset(("reward", "gold"))

    def files(self) -> Iterator[Path]:
        for role, name in self._scorers():
            if is_function(name):
                yield from function_files(name, f"objective.{role}")

    def _scorers(self) -> list[tuple[str, str]]:
        """(role, stage or function) of everything that scores completions."""
        return [("reward", self.reward), *([("gold", self.gold)] if self.gold else [])]

    @property
    def max_completion_tokens(self) -> int:
        return self.max_new

    @property
    def passes(self) -> int:
        return self.epochs

    @property
    def uses_reference(self) -> bool:
        return self.beta > 0

    @model_validator(mode="after")
    def _reference_has_weight(self) -> "OnPolicySettings":
        if self.reference and not self.uses_reference:
            raise ValueError(f"found reference = '{self.reference}' with beta = 0, which does not use it; set beta")
        return self


class PPOSettings(OnPolicySettings):
    """`objective = { kind = "ppo", reward = "rm" }`: proximal policy optimisation with a value head."""

    kind: Literal["ppo"] = "ppo"
    beta: float = Field(default=0.05, ge=0)
    """Weight of the KL divergence from the reference, in reward per nat; 0 needs no reference."""
    epochs: int = Field(default=4, ge=1)
    """How often each step trains on its completions."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 1 uses the full return, 0 one step and the value function."""
    value_weight: float = Field(default=0.1, ge=0)
    """Weight of the value function's loss."""
    value_clip: float = Field(default=0.2, gt=0)
    """A value that moved farther than this from its value at sampling time no longer lowers its loss."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over all tokens of a step."""
    truncated: Literal["terminal", "bootstrap", "mask"] = "terminal"
    """How a completion without a stop token is treated: as ended (`terminal`); as unfinished, with the value of its
    last state in place of its score (`bootstrap`); or left out (`mask`)."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL of a completion, in nats, that beta is adapted to; default: beta is constant."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Completions over which beta changes by a factor e^0.2 at most."""

    @model_validator(mode="after")
    def _consistent(self) -> "PPOSettings":
        if self.kl_target and not self.uses_reference:
            raise ValueError("found kl_target with beta = 0, which no factor changes; set an initial beta")
        if self.kl_target and self.kl.endswith("-loss"):
            raise ValueError(
                f"found kl_target with kl = '{self.kl}', whose beta is not adapted; use an estimator in the reward, "
                "such as k1-reward, or remove kl_target"
            )
        if self.truncated != "terminal" and self.no_stop_reward is not None:
            raise ValueError(
                f"found no_stop_reward with truncated = '{self.truncated}', which does not use it; remove one of them"
            )
        return self


class GRPOSettings(OnPolicySettings):
    """`objective = { kind = "grpo", reward = "check.py:right" }`: policy gradients with a baseline of each group.

    RLOO is `baseline = "others"`; Dr. GRPO is `aggregation = "constant"`; GRPO as published is `standardise = true,
    aggregation = "sequence"`; GSPO is `ratio = "sequence", aggregation = "sequence"`.
    """

    kind: Literal["grpo"] = "grpo"
    group: int = Field(default=8, ge=2)
    """Samples of each prompt."""
    baseline: Literal["mean", "others"] = "mean"
    """Baseline of a sample: the mean of its group, or of the other samples in it."""
    standardise: bool = False
    """Divide advantages by their group's standard deviation; very hard and very easy prompts then weigh more."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over sequences, of their mean; or over sequences, of their sum divided by `max_new`."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether the ratio of policy to sampling policy is per token, or per sequence (the mean over its tokens)."""
    truncated: Literal["terminal", "mask"] = "terminal"
    """How a completion without a stop token is treated: as ended (`terminal`), or left out of the loss but not of the
    baseline (`mask`)."""

    @property
    def samples(self) -> int:
        return self.group
