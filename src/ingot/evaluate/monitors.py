"""Monitors for reward hacking: pure functions of logged metrics that return alarms.

A policy that is optimised against a learned reward keeps increasing it, while the gold reward rises, peaks and falls
(Gao et al. 2023, arXiv:2210.10760). A gold reward is rarely available, so other symptoms are monitored too: a change of
answer length, repetition, a loss of entropy, and a large KL from the initial policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Series = Sequence[tuple[float, float]]
"""(step, value), sorted by step; in `judge` stages the steps are the numbers of the models."""

MAX_LENGTH_RATIO = 1.5
"""Alarm if answers are longer than at the start by more than this factor, or shorter."""
MIN_VARIETY_RATIO = 0.5
"""Alarm if the entropy or the fraction of distinct pairs falls below this fraction of its start."""
MAX_KL_NATS = 20.0
"""Alarm if the KL of an answer from the initial policy exceeds this."""
MAX_GOLD_LOSS = 0.03
"""Alarm if the gold reward loses more than this fraction of its rise."""
WINDOW = 0.05
"""Length of the start of a series, and of the smoothing window, as a fraction of the series."""
MIN_NOISE_VALUES = 10
"""Fewest values from which the noise of a series is estimated; shorter series count as noiseless."""


@dataclass(frozen=True)
class Alarm:
    """A symptom of reward hacking."""

    name: str
    step: float
    """The first step that shows it."""
    sentence: str


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Distinct n-grams of tokens / all n-grams (Li et al. 2016, arXiv:1510.03055); 1 if nothing repeats.

    The mean over texts of their own ratio, since the ratio over all texts together falls with their number.
    """
    ratios = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if grams:
            ratios.append(len(set(grams)) / len(grams))
    return float(np.mean(ratios)) if ratios else 1.0


def watch(series: Mapping[str, Series]) -> list[Alarm]:
    """Alarms, earliest first.

    Args:
        series: any of `proxy` (the trained reward), `gold` (the gold reward), `tokens` (mean length of answers),
            `kl_nats` (KL of an answer from the initial policy), `entropy_nats` (per token), `distinct_2`.
    """
    alarms = list(_hacking(series.get("proxy", ()), series.get("gold", ())))
    for name, low, high in (
        ("tokens", 1 / MAX_LENGTH_RATIO, MAX_LENGTH_RATIO),
        ("entropy_nats", MIN_VARIETY_RATIO, None),
        ("distinct_2", MIN_VARIETY_RATIO, None),
    ):
        alarms += _drift(name, series.get(name, ()), low, high)
    for step, value in _smooth(series.get("kl_nats", ())):
        if value > MAX_KL_NATS:
            sentence = (
                f"the KL from the initial policy exceeds {MAX_KL_NATS:g} nats an answer, where the reward is "
                "extrapolated; raise the weight of the KL, or stop earlier"
            )
            alarms.append(Alarm("kl_nats", step, sentence))
            break
    return sorted(alarms, key=lambda alarm: alarm.step)


def _hacking(proxy: Series, gold: Series) -> Iterator[Alarm]:
    """An alarm if the gold reward falls by more than its noise explains while the proxy is at its maximum.

    The fall is measured from the maximum so far, at each of n steps. The range of n values of pure noise is about
    2 sqrt(2 ln n) standard deviations, so smaller falls are ignored.
    """
    gold_at = dict(_smooth(gold))
    best_gold = best_proxy = -np.inf
    start = next(iter(gold_at.values()), 0.0)
    noise = 2 * np.sqrt(2 * np.log(max(len(gold), 1))) * _noise(gold)
    for step, value in _smooth(proxy):
        if step not in gold_at:
            continue
        best_gold, best_proxy = max(best_gold, gold_at[step]), max(best_proxy, value)
        if value >= best_proxy and best_gold - gold_at[step] > max(MAX_GOLD_LOSS * (best_gold - start), noise):
            sentence = (
                f"the trained reward climbs (to {value:.3g}) while the gold reward falls (from {best_gold:.3g} to "
                f"{gold_at[step]:.3g}); stop here, or raise the weight of the KL"
            )
            yield Alarm("hacking", step, sentence)
            return


def _noise(series: Series) -> float:
    """Standard deviation of the noise of the smoothed series, estimated from differences of neighbours.

    Medians of normal noise have pi / 2 times the variance of means.
    """
    if len(series) < MIN_NOISE_VALUES:
        return 0.0
    steps, width = np.diff([value for _, value in series]), _width(series)
    return float(np.std(steps) / np.sqrt(2 * width) * (np.sqrt(np.pi / 2) if width > 2 else 1))


_ADVICE = {
    "tokens": "answers are {0:.2g} times as long as at the start; check whether the reward favours length",
    "entropy_nats": "the entropy per token is {0:.2g} times its start: samples lose variety; raise the KL's weight",
    "distinct_2": "the fraction of distinct token pairs is {0:.2g} times its start: answers repeat themselves",
}


def _drift(name: str, series: Series, low: float, high: float | None) -> Iterator[Alarm]:
    """An alarm at the first value outside [low, high] times the start of the series."""
    if len(series) < 2 or (start := _start(series)) <= 0:
        return
    for step, value in _smooth(series)[_width(series) :]:  # the start is not compared with itself
        if value < low * start or (high is not None and value > high * start):
            yield Alarm(name, step, _ADVICE[name].format(value / start))
            return


def _start(series: Series) -> float:
    """The mean of the first window."""
    return float(np.mean([v for _, v in series[: _width(series)]]))


def _width(series: Series) -> int:
    return max(1, round(WINDOW * len(series)))


def _smooth(series: Series) -> list[tuple[float, float]]:
    """Running medians over the preceding window, so that a single outlier raises no alarm."""
    width = _width(series)
    values = np.array([value for _, value in series], float)
    medians = (np.median(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values)))
    return [(step, float(median)) for (step, _), median in zip(series, medians, strict=True)]
