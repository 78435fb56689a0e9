"""Selects documents by their scores: bounds and quantiles, and the phase of a curriculum. Pure functions over columns.

A quantile needs all documents, a decision only the threshold that follows from it. Thresholds are scores of documents
of the training split, so held-out text has no part in them, and a document without a score breaks every rule.

Shapes: N documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ingot.corpus.scores.settings import Bounds, Phase

OTHER_PHASE, NO_PHASE = "other_phase", "no_phase"
"""The reasons to drop a document of another phase than the one to keep, and one that no phase takes."""


class Interval(NamedTuple):
    """The scores from `low` to `high`, of which `below` is no longer part."""

    low: float
    high: float
    below: float

    def contains(self, scores: np.ndarray) -> np.ndarray:
        return (scores >= self.low) & (scores <= self.high) & (scores < self.below)


def interval(bounds: Bounds, scores: np.ndarray) -> Interval:
    """The scores that bounds keep.

    The quantile q of n scores is the one of rank ceil(q n) in ascending order, from 0. Documents of equal scores are on
    one side, so ranges that adjoin share no document and leave none out.

    Args:
        bounds: the bounds.
        scores: of all training documents; NaN for those without.
    """
    ordered = np.sort(scores[~np.isnan(scores)])
    low, high = _ranks(bounds, len(ordered))
    least = -np.inf if bounds.min is None else bounds.min
    if low > 0:
        least = max(least, float(ordered[low])) if low < len(ordered) else np.inf
    most = np.inf if bounds.max is None else bounds.max
    return Interval(least, most, float(ordered[high]) if high < len(ordered) else np.inf)


def _ranks(bounds: Bounds, documents: int) -> tuple[int, int]:
    """The ranks of both quantiles, from 0."""
    low, high = (int(np.ceil(q * documents - 1e-9)) for q in bounds.quantiles)
    return low, high


class Tie(NamedTuple):
    """A quantile that falls among equal scores, so that far more or fewer documents are kept than it asks for."""

    bound: str
    """The setting, such as `top = 0.5`."""
    score: float
    equal: int
    """Documents with that score."""
    kept: int
    """Documents that the quantiles keep."""
    asked: int
    documents: int

    def message(self, rule: str) -> str:
        return (
            f"{rule}: {self.bound} keeps {self.kept:,} of {self.documents:,} documents, expected {self.asked:,}, "
            f"because {self.equal:,} of them have the score {self.score:g} and equal scores are kept or dropped "
            "together; choose another fraction or score"
        )


def tie(bounds: Bounds, scores: np.ndarray) -> Tie | None:
    """The tie that changes the number of documents by a tenth of all or more, or by a factor of two; None without one.

    Args:
        bounds, scores: as in `interval`.
    """
    ordered = np.sort(scores[~np.isnan(scores)])
    n, ranks = len(ordered), [min(rank, len(ordered)) for rank in _ranks(bounds, len(ordered))]
    cuts = [rank for rank in ranks if 0 < rank < n]
    if not cuts:
        return None
    first, last = (int(np.searchsorted(ordered, ordered[rank])) if rank < n else n for rank in ranks)
    kept, asked = last - first, ranks[1] - ranks[0]
    if abs(kept - asked) < n / 10 and asked <= 2 * kept <= 4 * asked:
        return None
    equal, score = max((int((ordered == ordered[cut]).sum()), float(ordered[cut])) for cut in cuts)
    name = next(name for name in ("top", "bottom", "between") if getattr(bounds, name) is not None)
    value = getattr(bounds, name)
    text = f"{value:g}" if isinstance(value, float) else f"[{value[0]:g}, {value[1]:g}]"
    return Tie(f"{name} = {text}", score, equal, kept, asked, n)


class Decision(NamedTuple):
    """What becomes of N documents."""

    reasons: np.ndarray
    """Why each is dropped: an object array of str, or None for those to keep."""
    phases: np.ndarray | None
    """The phase of each, or None; None without phases."""
    intervals: dict[str, Interval]
    """The scores that each rule keeps, by `SCORE` or `PHASE.SCORE`; of a rule per language by `SCORE/LANGUAGE`."""
    ties: dict[str, Tie]
    """The rules whose quantiles fall among equal scores, by the names of `intervals`."""


def decide(
    scores: Mapping[str, np.ndarray],
    is_train: np.ndarray,
    where: Mapping[str, Bounds],
    phases: Sequence[Phase],
    languages: np.ndarray | None = None,
) -> Decision:
    """Decide which documents to keep, and their phases.

    The rules of `where` come first, all by quantiles of all documents. Phases see the documents that are left: their
    quantiles are those of these. A document belongs to the first phase whose rules it keeps.

    Args:
        scores: score -> its value for each document, float32; NaN where there is none.
        is_train: whether each is in the training split, N bool.
        where: score -> bounds.
        phases: phases in order.
        languages: of the documents, N str, for bounds per language.
    """
    reasons = np.full(len(is_train), None, object)
    intervals, ties = dict[str, Interval](), dict[str, Tie | None]()
    for name, bounds in where.items():
        values = scores[name]
        for group, rows in _groups(bounds, is_train, languages):
            trained = values[is_train & rows]
            rule = intervals[f"{name}{group}"] = interval(bounds, trained)
            ties[f"{name}{group}"] = tie(bounds, trained)
            open_ = rows & (reasons == None)  # noqa: E711 - each element is compared
            reasons[open_ & np.isnan(values)] = f"{name}_missing"
            reasons[open_ & (values < rule.low)] = f"{name}_low"
            reasons[open_ & ((values > rule.high) | (values >= rule.below))] = f"{name}_high"
    if not phases:
        return Decision(reasons, None, intervals, _found(ties))
    kept = reasons == None  # noqa: E711
    found = np.full(len(is_train), None, object)
    for phase in phases:
        inside = kept & (found == None)  # noqa: E711
        for name, bounds in phase.where.items():
            for group, rows in _groups(bounds, is_train, languages):
                values = scores[name][is_train & kept & rows]
                rule = intervals[f"{phase.name}.{name}{group}"] = interval(bounds, values)
                ties[f"{phase.name}.{name}{group}"] = tie(bounds, values)
                inside &= ~rows | rule.contains(scores[name])
        found[inside] = phase.name
    reasons[kept & (found == None)] = NO_PHASE  # noqa: E711
    return Decision(reasons, found, intervals, _found(ties))


def _found(ties: Mapping[str, Tie | None]) -> dict[str, Tie]:
    return {rule: found for rule, found in ties.items() if found}


def _groups(bounds: Bounds, is_train: np.ndarray, languages: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """The end of a rule's name, and the documents whose quantiles are taken together, N bool."""
    if bounds.per is None:
        yield "", np.ones(len(is_train), bool)
        return
    assert languages is not None
    for language in np.unique(languages):
        yield f"/{language}", languages == language
