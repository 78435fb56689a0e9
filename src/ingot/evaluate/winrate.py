"""Win rates of one model ("ours") against another ("theirs"), from verdicts over the same prompts.

Shapes: P prompts. A verdict is 1 (ours wins), 0 (theirs wins), 1/2 (a tie), or NaN (no verdict).

Win rate = (wins + ties / 2) / verdicts, with a Wilson interval over prompts (slightly too wide with many ties, whose
variance is smaller). Scores are compared prompt by prompt, and their mean difference has a bootstrap interval over
prompts, which is much narrower than the difference of two means. Judges and people prefer long answers (Dubois et al.
2024, arXiv:2404.04475), so the win rate is also reported for prompts where our answer is longer, of similar length, and
shorter. A model that wins only with longer answers has only learned length.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ingot.core.statistics import wilson
from ingot.evaluate.bootstrap import ratio

SIMILAR = 0.1
"""Lengths are similar if they differ by at most this fraction of the longer one."""


def by_scores(ours_P: np.ndarray, theirs_P: np.ndarray, tie: float = 0.0) -> np.ndarray:
    """Verdicts from scores of single answers; scores that differ by at most `tie` are a tie."""
    difference_P = np.asarray(ours_P, float) - np.asarray(theirs_P, float)
    verdict_P = np.where(np.abs(difference_P) <= tie, 0.5, (difference_P > 0).astype(float))
    return np.where(np.isnan(difference_P), np.nan, verdict_P)


def by_both_orders(ours_first_P: np.ndarray, theirs_first_P: np.ndarray) -> np.ndarray:
    """Verdicts of a judge that compares two answers, in both orders; it is a tie if the orders disagree.

    Args:
        ours_first_P: the judge's probability of our answer, with ours shown first.
        theirs_first_P: the judge's probability of our answer, with theirs shown first.
    """
    first_P, second_P = np.sign(ours_first_P - 0.5), np.sign(theirs_first_P - 0.5)
    return np.where(first_P == second_P, 0.5 + first_P / 2, 0.5)


def rows(verdict_P: np.ndarray, ours_P: np.ndarray, theirs_P: np.ndarray) -> Iterator[dict[str, Any]]:
    """Table rows: the win rate, overall and by relative length, and the fraction of ties.

    Args:
        ours_P, theirs_P: lengths of the answers in tokens.
    """
    yield {"metric": "win_rate", **_rate(verdict_P)}
    similar_P = np.abs(ours_P - theirs_P) <= SIMILAR * np.maximum(ours_P, theirs_P)
    by_length = {
        "longer": ~similar_P & (ours_P > theirs_P),
        "similar": similar_P,
        "shorter": ~similar_P & (ours_P < theirs_P),
    }
    for name, selected_P in by_length.items():
        if (~np.isnan(verdict_P[selected_P])).any():
            yield {"metric": f"win_rate_{name}", **_rate(verdict_P[selected_P])}
    valid_P = verdict_P[~np.isnan(verdict_P)]
    yield {"metric": "ties", **wilson(int((valid_P == 0.5).sum()), len(valid_P))}


def order_rows(ours_first_P: np.ndarray, theirs_first_P: np.ndarray) -> Iterator[dict[str, Any]]:
    """Table rows: how often the judge prefers the first answer (1/2 without position bias), and its mean probability of
    our answer over both orders. The arguments are those of `by_both_orders`."""
    first_P = np.concatenate([ours_first_P > 0.5, theirs_first_P < 0.5])
    yield {"metric": "first_preferred", **wilson(int(first_P.sum()), len(first_P))}
    yield {"metric": "probability", **ratio((ours_first_P + theirs_first_P) / 2, np.ones(len(ours_first_P)))}


def score_rows(ours_P: np.ndarray, theirs_P: np.ndarray | None) -> Iterator[dict[str, Any]]:
    """Table rows: the mean score, and the mean difference to the other model's scores on the same prompts."""
    scored_P = ~np.isnan(ours_P)
    if scored_P.any():
        yield {"metric": "score", **_mean(ours_P[scored_P])}
    if theirs_P is not None and (both_P := scored_P & ~np.isnan(theirs_P)).any():
        yield {"metric": "score_difference", **_mean((ours_P - theirs_P)[both_P])}


def _rate(verdict_P: np.ndarray) -> dict[str, float]:
    valid_P = verdict_P[~np.isnan(verdict_P)]
    return wilson(float(valid_P.sum()), len(valid_P))


def _mean(values_P: np.ndarray) -> dict[str, float]:
    return ratio(values_P, np.ones(len(values_P)))
