"""Settings of the penalties against forgetting, which can be combined with any objective. No torch."""

from typing import Annotated, Literal

from pydantic import Field

from ingot.core.settings import Settings, Stage


class _Penalty(Settings):
    @property
    def stage(self) -> str | None:
        """The stage that it refers to; None: this stage's `init`."""
        return None

    def companions(self) -> dict[str, str | None]:
        """Role -> stage of each frozen model that it needs; None: this stage's `init`."""
        return {}


class EwcSettings(_Penalty):
    """`{ kind = "ewc", fisher = "STAGE", weight = 100 }`: pulls weights that matter for an old task to their old value.

    Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796).
    """

    kind: Literal["ewc"] = "ewc"
    fisher: Annotated[str, Stage("importance")]
    """Stage of kind fisher, with the importance and the old value of each weight."""
    weight: float = Field(ge=0)
    """Adds weight / 2 * sum F (theta - theta*)^2. F is per token, so with weight = 1 a token of the old task counts, to
    second order, as much as one of the new."""
    clip: float = Field(default=0.999, gt=0, le=1)
    """Importances above this quantile are clipped to it; 1 clips nothing."""
    floor: float = Field(default=0.0, ge=0)
    """Smallest importance, as a fraction of the mean."""
    normalise: bool = False
    """Divide importances by their mean, so that `weight` has a similar effect for every model."""

    @property
    def stage(self) -> str | None:
        return self.fisher


class L2spSettings(_Penalty):
    """`{ kind = "l2sp", weight = 0.01 }`: pulls every weight to its value at the start of this stage.

    L2-SP (Li et al. 2018, arXiv:1802.01483).
    """

    kind: Literal["l2sp"] = "l2sp"
    weight: float = Field(ge=0)
    """Adds weight / 2 * sum (theta - theta_init)^2."""


class KlSettings(_Penalty):
    """`{ kind = "kl", weight = 0.1 }`: keeps predictions on this stage's own text near those of an older model."""

    kind: Literal["kl"] = "kl"
    reference: Annotated[str | None, Stage("model")] = None
    """Train or import stage of the older model; default: `init`."""
    weight: float = Field(ge=0)
    """Adds weight * KL(reference || model) of each labelled token, over the full vocabulary."""

    @property
    def stage(self) -> str | None:
        return self.reference

    @property
    def role(self) -> str:
        """Role of its reference, distinct from the companions of the objective and of other penalties."""
        return f"kl.{self.reference or 'init'}"

    def companions(self) -> dict[str, str | None]:
        return {self.role: self.reference}


PenaltySettings = Annotated[EwcSettings | L2spSettings | KlSettings, Field(discriminator="kind")]
"""One of a recipe's `penalties`."""
ANCHORS = ("ewc", "l2sp")
"""Kinds that are functions of the weights (`optim/grad_terms.py`)."""
