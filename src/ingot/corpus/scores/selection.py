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
    low, high = (int(np.ceil(q * len(ordered) - 1e-9)) for q in bounds.quantiles)
    least = -np.inf if bounds.min is None else bounds.min
    if low > 0:
        least = max(least, float(ordered[low])) if low < len(ordered) else np.inf
    most = np.inf if bounds.max is None else bounds.max
    return Interval(least, most, float(ordered[high]) if high < len(ordered) else np.inf)


class Decision(NamedTuple):
    """What becomes of N documents."""

    reasons: np.ndarray
    """Why each is dropped: an object array of str, or None for those to keep."""
    phases: np.ndarray | None
    """The phase of each, or None; None without phases."""
    intervals: dict[str, Interval]
    """The scores that each rule keeps, by `SCORE` or `PHASE.SCORE`; of a rule per language by `SCORE/LANGUAGE`."""


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
    reasons, intervals = np.full(len(is_train), None, object), dict[str, Interval]()
    for name, bounds in where.items():
        values = scores[name]
        for group, rows in _groups(bounds, is_train, languages):
            rule = intervals[f"{name}{group}"] = interval(bounds, values[is_train & rows])
            open_ = rows & (reasons == None)  # noqa: E711 - each element is compared
            reasons[open_ & np.isnan(values)] = f"{name}_missing"
            reasons[open_ & (values < rule.low)] = f"{name}_low"
            reasons[open_ & ((values > rule.high) | (values >= rule.below))] = f"{name}_high"
    if not phases:
        return Decision(reasons, None, intervals)
    kept = reasons == None  # noqa: E711
    found = np.full(len(is_train), None, object)
    for phase in phases:
        inside = kept & (found == None)  # noqa: E711
        for name, bounds in phase.where.items():
            for group, rows in _groups(bounds, is_train, languages):
                rule = interval(bounds, scores[name][is_train & kept & rows])
                intervals[f"{phase.name}.{name}{group}"] = rule
                inside &= ~rows | rule.contains(scores[name])
        found[inside] = phase.name
    reasons[kept & (found == None)] = NO_PHASE  # noqa: E711
    return Decision(reasons, found, intervals)


def _groups(bounds: Bounds, is_train: np.ndarray, languages: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """The end of a rule's name, and the documents whose quantiles are taken together, N bool."""
    if bounds.per is None:
        yield "", np.ones(len(is_train), bool)
        return
    assert languages is not None
    for language in np.unique(languages):
        yield f"/{language}", languages == language
