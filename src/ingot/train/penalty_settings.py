"""Settings of the penalties that any objective can be given: what an old task needs, and what it is worth. No torch."""

from typing import Annotated, Literal

from pydantic import Field

from ingot.core.settings import Settings, Stage


class _Penalty(Settings):
    @property
    def stage(self) -> str | None:
        """What it holds on to, by name; None is where this stage started."""
        return None

    def companions(self) -> dict[str, str | None]:
        """Role -> stage of each frozen model that it compares with; None is the stage's `init`."""
        return {}


class EwcSettings(_Penalty):
    """`{ kind = "ewc", fisher = "STAGE", weight = 100 }`: weights that an old task hangs on stay where they were."""

    kind: Literal["ewc"] = "ewc"
    fisher: Annotated[str, Stage("importance")]
    """Stage of kind fisher: the importance of each weight, and where it was."""
    weight: float = Field(ge=0)
    """Adds weight / 2 * sum F (theta - theta*)^2. With F per token, as measured, weight = 1 counts a token of the old
    task, to second order, like one of the new."""
    clip: float = Field(default=0.999, gt=0, le=1)
    """Importances above this quantile of all are cut to it; 1 cuts nothing."""
    floor: float = Field(default=0.0, ge=0)
    """Least importance, as a share of the mean."""
    normalise: bool = False
    """Divide importances by their mean, so that a weight means about the same for every model."""

    @property
    def stage(self) -> str | None:
        return self.fisher


class L2spSettings(_Penalty):
    """`{ kind = "l2sp", weight = 0.01 }`: every weight stays near where this stage started, all alike."""

    kind: Literal["l2sp"] = "l2sp"
    weight: float = Field(ge=0)
    """Adds weight / 2 * sum (theta - theta_init)^2."""


class KlSettings(_Penalty):
    """`{ kind = "kl", weight = 0.1 }`: predictions on this stage's own text stay near those of an older model."""

    kind: Literal["kl"] = "kl"
    reference: Annotated[str | None, Stage("model")] = None
    """Train or import stage whose predictions are kept; default: `init`."""
    weight: float = Field(ge=0)
    """Adds weight * KL(reference || model) for each labelled token, over the whole vocabulary."""

    @property
    def stage(self) -> str | None:
        return self.reference

    @property
    def role(self) -> str:
        """Of its reference, apart from what the objective or another penalty keeps beside it."""
        return f"kl.{self.reference or 'init'}"

    def companions(self) -> dict[str, str | None]:
        return {self.role: self.reference}


PenaltySettings = Annotated[EwcSettings | L2spSettings | KlSettings, Field(discriminator="kind")]
"""One of a recipe's `penalties`."""
ANCHORS = ("ewc", "l2sp")
"""Kinds that pull weights to where they were."""
