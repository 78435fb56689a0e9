"""Settings of the kinds that score and select documents: `scorer`, `score` and `select`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.core.settings import EXECUTION, STAGE, Settings, Stage
from ingot.corpus.scores.settings import Bounds, Measure, Phase, Sorting, TextMeasure


class ScorerSettings(Settings):
    """`kind = "scorer"`: learns to score documents from examples."""

    type: Literal["classifier", "ngram"] = "classifier"
    """`classifier`: the probability that a document is like the good ones and not like the bad ones; `ngram`: a measure
    by counts of words in the good ones."""
    good: Annotated[list[str], Stage("documents")] = Field(min_length=1)
    """Corpora with examples of what to keep. Their held-out documents measure the scorer."""
    bad: Annotated[list[str], Stage("documents")] = Field(default_factory=list)
    """Corpora with examples of what to drop; an `ngram` is not trained on them, only measured."""
    measure: Measure = "perplexity"
    """Of an `ngram`. `perplexity`: bits per byte, high for what is unlike the good ones; `order`: bits per word that
    the words before save, low for words without order."""

    @model_validator(mode="after")
    def _fits_type(self) -> "ScorerSettings":
        if self.type == "classifier" and not self.bad:
            raise ValueError("found no bad, expected corpora to tell the good ones from; name some")
        if self.type == "classifier" and self.measure != "perplexity":
            raise ValueError('measure: not used by type classifier; remove it, or set type = "ngram"')
        if both := sorted(set(self.good) & set(self.bad)):
            raise ValueError(f"found {both[0]} in good and in bad, expected it in one; remove it from the other")
        return self


class ScoreSettings(Settings):
    """`kind = "score"`: the documents of a corpus with a column for each score."""

    data: Annotated[str, Stage("documents")]
    """The corpus."""
    by: Annotated[list[str], STAGE] = Field(default_factory=list)
    """Scorer stages, and train or import stages, whose score is the bits per byte of a document of text. The name of
    the stage is the name of the score."""
    measures: list[TextMeasure] = Field(default_factory=list)
    """Scores that need no model: `words`, `repetition`, and `similarity` to the documents before it in the corpus and
    to all of `similar_to`. The name of the measure is the name of the score."""
    similar_to: Annotated[list[str], Stage("documents")] = Field(default_factory=list)
    """Other corpora that `similarity` compares with, such as the prompts that others were written from."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where models compute, in fp32; `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _something(self) -> "ScoreSettings":
        if not (self.by or self.measures):
            raise ValueError("found nothing to score by, expected some of by and measures; name some")
        names = [*self.by, *self.measures]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"found the score {twice[0]} twice in by and measures, expected different names; name it once"
            )
        if self.similar_to and "similarity" not in self.measures:
            raise ValueError("found similar_to without the measure similarity, which reads it; leave it out")
        return self


class SelectSettings(Settings):
    """`kind = "select"`: the documents of a scored corpus that keep some bounds."""

    data: Annotated[str, Stage("documents")]
    """A corpus with scores."""
    where: dict[str, Bounds] = Field(default_factory=dict)
    """Score -> bounds, all of which a document must keep."""
    phases: list[Phase] = Field(default_factory=list)
    """Phases of a curriculum; a document belongs to the first one whose bounds it keeps, and is dropped without one."""
    phase: str | None = None
    """Keep the documents of this phase, of a corpus with phases."""
    sort: Sorting | None = None
    """Write the documents in the order of a score: { by = "difficulty" }. A train stage or phase with order = "stored"
    trains in this order. Default: in the order of the corpus."""

    @model_validator(mode="after")
    def _something(self) -> "SelectSettings":
        if not (self.where or self.phases or self.phase or self.sort):
            raise ValueError("found nothing to select by, expected some of where, phases, phase and sort")
        if self.phases and self.phase:
            raise ValueError("found both phases and phase; select one phase in a stage that reads this one")
        names = [phase.name for phase in self.phases]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"found more than one phase named '{twice[0]}', expected different names")
        if rest := [phase.name for phase in self.phases[:-1] if not phase.where]:
            raise ValueError(
                f"found phase '{rest[0]}' without bounds, which takes all documents, before others; put it last"
            )
        return self
