"""Which of two models answers better: verdicts over the same prompts, and what they add up to.

Shapes: P prompts. A verdict is 1 (ours), 0 (theirs), 1/2 (a tie), NaN (nobody could say).

Win rate = (wins + ties / 2) / verdicts, with Wilson's interval over prompts (a tie has less spread than a coin's throw,
so it is a little wide with many of them). Scores are compared prompt by prompt: their mean difference has a bootstrap
interval over prompts, far narrower than that of two means. Judges, people among them, like long answers, so the rate is
also given for prompts where ours was longer, about as long, and shorter (Dubois et al. 2024, arXiv:2404.04475, have the
evidence): a model that wins only where it is longer has learned to be long.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ingot.core.statistics import wilson
from ingot.evaluate.bootstrap import ratio

SIMILAR = 0.1
"""Lengths that differ by at most this share of the longer one are about the same."""


def by_scores(ours_P: np.ndarray, theirs_P: np.ndarray, tie: float = 0.0) -> np.ndarray:
    """Verdicts of a judge that scores answers one by one; scores at most `tie` apart are a tie."""
    apart_P = np.asarray(ours_P, float) - np.asarray(theirs_P, float)
    verdict_P = np.where(np.abs(apart_P) <= tie, 0.5, (apart_P > 0).astype(float))
    return np.where(np.isnan(apart_P), np.nan, verdict_P)


def by_both_orders(ours_first_P: np.ndarray, theirs_first_P: np.ndarray) -> np.ndarray:
    """Verdicts of a judge that is shown both answers: one that changes its mind with the order has none, a tie.

    Args:
        ours_first_P: probability it gives to our answer, shown first.
        theirs_first_P: probability it gives to our answer, shown second.
    """
    first_P, second_P = np.sign(ours_first_P - 0.5), np.sign(theirs_first_P - 0.5)
    return np.where(first_P == second_P, 0.5 + first_P / 2, 0.5)


def rows(verdict_P: np.ndarray, ours_P: np.ndarray, theirs_P: np.ndarray) -> Iterator[dict[str, Any]]:
    """Table rows: win rate, as a whole and by length, share of ties.

    Args:
        ours_P, theirs_P: lengths of the answers in tokens.
    """
    yield {"metric": "win_rate", **_rate(verdict_P)}
    similar_P = np.abs(ours_P - theirs_P) <= SIMILAR * np.maximum(ours_P, theirs_P)
    parts = {
        "longer": ~similar_P & (ours_P > theirs_P),
        "similar": similar_P,
        "shorter": ~similar_P & (ours_P < theirs_P),
    }
    for name, part_P in parts.items():
        if (~np.isnan(verdict_P[part_P])).any():
            yield {"metric": f"win_rate_{name}", **_rate(verdict_P[part_P])}
    said_P = verdict_P[~np.isnan(verdict_P)]
    yield {"metric": "ties", **wilson(int((said_P == 0.5).sum()), len(said_P))}


def order_rows(ours_first_P: np.ndarray, theirs_first_P: np.ndarray) -> Iterator[dict[str, Any]]:
    """How far a judge goes by the order: how often it prefers what it is shown first (1/2 where it does not care), and
    the mean probability of our answer over both orders."""
    first_P = np.concatenate([ours_first_P > 0.5, theirs_first_P < 0.5])
    yield {"metric": "first_preferred", **wilson(int(first_P.sum()), len(first_P))}
    yield {"metric": "probability", **ratio((ours_first_P + theirs_first_P) / 2, np.ones(len(ours_first_P)))}


def score_rows(ours_P: np.ndarray, theirs_P: np.ndarray | None) -> Iterator[dict[str, Any]]:
    """The mean score, and its difference to theirs on the same prompts."""
    known_P = ~np.isnan(ours_P)
    if known_P.any():
        yield {"metric": "score", **_mean(ours_P[known_P])}
    if theirs_P is not None and (both_P := known_P & ~np.isnan(theirs_P)).any():
        yield {"metric": "score_difference", **_mean((ours_P - theirs_P)[both_P])}


def _rate(verdict_P: np.ndarray) -> dict[str, float]:
    said_P = verdict_P[~np.isnan(verdict_P)]
    return wilson(float(said_P.sum()), len(said_P))


def _mean(values_P: np.ndarray) -> dict[str, float]:
    return ratio(values_P, np.ones(len(values_P)))
