"""Settings of scores: the measures of an n-gram model, and the rules by which documents are selected."""

from typing import Literal

from pydantic import Field, model_validator

from ingot.core.settings import Settings

Measure = Literal["perplexity", "order"]
"""What an n-gram model measures (`ngram.py`)."""
TextMeasure = Literal["words", "repetition", "similarity"]
"""Scores of a text that need no model (`text_measures.py`)."""


class Bounds(Settings):
    """The scores to keep: values, inclusive, and at most one range of quantiles."""

    min: float | None = None
    """Lowest score."""
    max: float | None = None
    """Highest score."""
    top: float | None = Field(default=None, gt=0, le=1)
    """The fraction of the documents with the highest scores."""
    bottom: float | None = Field(default=None, gt=0, le=1)
    """The fraction of the documents with the lowest scores."""
    between: tuple[float, float] | None = None
    """The documents between two quantiles: `[0.25, 0.5]` is the second quarter, from low to high scores."""
    per: Literal["language"] | None = None
    """Take the quantiles of each language by themselves, so that English text does not decide what is rare in German.
    Default: of all documents together."""

    @model_validator(mode="after")
    def _some(self) -> "Bounds":
        given = [name for name in ("min", "max", "top", "bottom", "between") if getattr(self, name) is not None]
        if not given:
            raise ValueError("found no bound, expected some of min, max, top, bottom and between")
        if len(quantiles := [name for name in given if name not in ("min", "max")]) > 1:
            raise ValueError(f"found {' and '.join(quantiles)}, expected one of them; leave the others out")
        if self.per and not quantiles:
            raise ValueError(f"found per = '{self.per}' without a quantile, expected top, bottom or between; remove it")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"found min = {self.min:g} above max = {self.max:g}; exchange them")
        if self.between and not 0 <= self.between[0] < self.between[1] <= 1:
            raise ValueError(
                f"found between = {list(self.between)}, expected two quantiles from 0 to 1, the lower first"
            )
        return self

    @property
    def quantiles(self) -> tuple[float, float]:
        """The range of quantiles; (0, 1) without one."""
        if self.top is not None:
            return 1 - self.top, 1.0
        return (0.0, self.bottom) if self.bottom is not None else self.between or (0.0, 1.0)


class Sorting(Settings):
    """The order of documents by a score."""

    by: str
    """The score. Documents without one are the last."""
    first: Literal["low", "high"] = "low"
    """The scores that come first."""


class Phase(Settings):
    """A phase of a curriculum, and the documents that belong to it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Its name, which the documents get in the column `phase`."""
    where: dict[str, Bounds] = Field(default_factory=dict)
    """Score -> bounds, all of which hold; without any, the phase takes all documents that earlier phases left."""
