"""Settings of the objectives that learn from their own samples: ppo and grpo. No torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.core.functions import is_function, require_file
from ingot.core.settings import Stage
from ingot.objectives.base_settings import MethodSettings

KLName = Literal["k1-reward", "k2-reward", "k3-reward", "k1-loss", "k2-loss", "k3-loss", "k3-ratio-loss"]
"""Estimator of the KL divergence from the reference, and where it stands; `policy.KLS` says what each one optimises."""


class SampledSettings(MethodSettings):
    """What `ppo` and `grpo` share."""

    reward: Annotated[str, Stage("model")] = Field(min_length=1)
    """What a completion is worth: a train stage with objective `reward`, or `"file.py:function"`, called with a list of
    prompts (tables with `prompt` and the further fields of their row) and a list of completions, returning a number
    for each, or None where it cannot say."""
    gold: Annotated[str | None, Stage("model")] = Field(default=None, min_length=1)
    """What is really wanted, where that can be asked: another such stage or function. It is never learned from, but
    logged as `gold_reward`, so that the report can say where the reward is gamed."""
    reference: Annotated[str | None, Stage("model")] = None
    """Stage whose model the policy is held near; default: `init`."""
    beta: float = Field(default=0.0, ge=0)
    """What a nat of KL divergence from the reference costs; 0 needs no reference."""
    kl: KLName = "k1-reward"
    """Estimator of that divergence and where it stands; all but k1-reward, k2-loss and k3-ratio-loss optimise something
    else than KL(policy || reference)."""
    max_new: int = Field(default=128, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling, and of the policy that is trained: logits are divided by it in every forward pass."""
    epochs: int = Field(default=1, ge=1)
    """How often the completions of a step are trained on."""
    minibatches: int = Field(default=1, ge=1)
    """Updates of an epoch, each from another part of the completions."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """A ratio of policy to sampling policy below 1 - clip earns no more gradient."""
    clip_high: float | None = Field(default=None, gt=0)
    """The same above 1 + clip_high; default: `clip`. DAPO takes 0.28."""
    no_stop_reward: float | None = None
    """Reward of a completion in which no stop token came, in place of its score (OpenAI: -1); default: its score."""

    def companions(self) -> dict[str, str | None]:
        reference: dict[str, str | None] = {"reference": self.reference} if self.held else {}
        return reference | {role: name for role, name in self._asked() if not is_function(name)}

    @property
    def scoring_roles(self) -> frozenset[str]:
        return frozenset(("reward", "gold"))

    def files(self) -> Iterator[Path]:
        for role, name in self._asked():
            if is_function(name):
                yield require_file(name, f"objective.{role}")

    def _asked(self) -> list[tuple[str, str]]:
        return [("reward", self.reward), *([("gold", self.gold)] if self.gold else [])]

    @property
    def completion(self) -> int:
        return self.max_new

    @property
    def passes(self) -> int:
        return self.epochs

    @property
    def held(self) -> bool:
        """Whether there is a reference that the policy is held near."""
        return self.beta > 0

    @model_validator(mode="after")
    def _reference_is_read(self) -> "SampledSettings":
        if self.reference and not self.held:
            raise ValueError(f"found reference = '{self.reference}' with beta = 0, so nobody reads it; set beta")
        return self


class PPOSettings(SampledSettings):
    """`objective = { kind = "ppo", reward = "rm" }`: proximal policy optimisation with a value head."""

    kind: Literal["ppo"] = "ppo"
    beta: float = Field(default=0.05, ge=0)
    """What a nat of KL divergence from the reference costs; 0 needs no reference."""
    epochs: int = Field(default=4, ge=1)
    """How often the completions of a step are trained on."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 1 waits for the whole reward, 0 believes the value function."""
    value_weight: float = Field(default=0.1, ge=0)
    """Weight of the value function's loss."""
    value_clip: float = Field(default=0.2, gt=0)
    """How far a value may move from the one at sampling before its loss stops to shrink."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is rewarded."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over all tokens of a step."""
    truncated: Literal["terminal", "bootstrap", "mask"] = "terminal"
    """A completion without a stop token: taken as ended; taken as unfinished, its value standing for the rest and its
    score not counting; or left out."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL of a completion, in nats, that beta is adapted to; default: beta stays."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Completions over which beta is adapted by a factor e^0.2."""

    @model_validator(mode="after")
    def _consistent(self) -> "PPOSettings":
        if self.kl_target and not self.held:
            raise ValueError("found kl_target with beta = 0, which no factor changes; set a beta to begin with")
        if self.kl_target and self.kl.endswith("-loss"):
            raise ValueError(
                f"found kl_target with kl = '{self.kl}', whose beta is not adapted; take an estimator in the reward, "
                "such as k1-reward, or leave kl_target out"
            )
        if self.truncated != "terminal" and self.no_stop_reward is not None:
            raise ValueError(
                f"found no_stop_reward with truncated = '{self.truncated}', which does not read it; leave one out"
            )
        return self


class GRPOSettings(SampledSettings):
    """`objective = { kind = "grpo", reward = "check.py:right" }`: groups of samples are each other's baseline.

    RLOO is `baseline = "others"`; Dr. GRPO is `aggregation = "constant"`; GRPO as published is `standardise = true,
    aggregation = "sequence"`; GSPO is `ratio = "sequence", aggregation = "sequence"`.
    """

    kind: Literal["grpo"] = "grpo"
    group: int = Field(default=8, ge=2)
    """Samples of each prompt."""
    baseline: Literal["mean", "others"] = "mean"
    """What a sample is compared with: the mean of its group, or of the others in it."""
    standardise: bool = False
    """Divide advantages by their group's standard deviation: very hard and very easy prompts then weigh more."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over sequences, of their mean; or over sequences, of their sum divided by `max_new`."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether a ratio of policy to sampling policy is of a token or of a sequence (the mean over its tokens)."""
    truncated: Literal["terminal", "mask"] = "terminal"
    """A completion without a stop token: taken as ended, or left out of the loss (but not out of the baseline)."""

    @property
    def samples(self) -> int:
        return self.group
