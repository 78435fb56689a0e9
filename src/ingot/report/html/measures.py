"""Charts of what an objective logs besides its loss: how each number is called, and what it is counted in.

A number that is not listed has a chart under its own name, so an objective of one's own needs no line here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ingot.report import figures
from ingot.report.html.charts import Series, line_chart

PLAIN = frozenset(
    {"step", "time", "attempt", "event", "loss_nats", "loss", "grad_norm", "lr", "tokens", "tokens_seen", "tok_s"}
)
"""Fields of a step's event that need no chart, or have one in every train stage."""
SIDES = ("chosen", "rejected")
"""Of a pair: what is logged of either is drawn in one chart."""


class Measure(NamedTuple):
    """A chart's words."""

    title: str
    unit: str


MEASURES = {
    "reward": Measure("Reward", "mean over answers"),
    "gold_reward": Measure("Gold reward", "mean over answers"),
    "reward_std": Measure("Spread of the reward", "standard deviation over answers"),
    "kl_nats": Measure("KL from the reference", "nats per answer"),
    "beta": Measure("KL coefficient", "beta"),
    "completion_tokens": Measure("Length of an answer", "tokens"),
    "truncated_share": Measure("Answers without an end", "share"),
    "unscored_share": Measure("Answers without a reward", "share"),
    "groups_without_signal": Measure("Groups of equal rewards", "share"),
    "entropy_nats": Measure("Entropy", "nats per token"),
    "approx_kl": Measure("KL from the policy that sampled", "nats per token"),
    "clip_fraction": Measure("Ratios beyond the clip", "share of tokens"),
    "explained_variance": Measure("Variance that the critic explains", "share"),
    "value_loss": Measure("Loss of the critic", "squared error"),
    "weighted_logp": Measure("ln p times advantage", "nats per token"),
    "first_ratio": Measure("Ratio at the first update", "1 unless something is broken"),
    "sampler_gap": Measure("ln p of sampler and trainer, difference", "nats per token"),
    "accuracy": Measure("Pairs told apart", "share"),
    "rewards/accuracy": Measure("Pairs told apart", "share"),
    "margin": Measure("Reward of chosen less rejected", "reward"),
    "rewards/margin": Measure("Implicit reward of chosen less rejected", "reward"),
    "rewards": Measure("Implicit reward", "beta times log-ratio"),
    "logps": Measure("ln p of an answer", "nats"),
    "kl_zero": Measure("Zero that answers are measured from", "nats per answer"),
    "replay_nats": Measure("Loss of replayed rows", "nats per token"),
    "replay_fraction": Measure("Replayed rows", "fraction of tokens"),
    "tokens": Measure("Length of an answer", "tokens"),
}
"""In the order of their charts; of numbers of both sides, the name that they share."""


def measures(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], smooth: float
) -> list[Markup]:
    """A chart of each further number of a step, with its held-out values where there are some.

    Args:
        steps, evaluations: events of a stage.
        smooth: weight of the running mean.
    """
    found = dict.fromkeys(n for s in steps for n, v in s.items() if n not in PLAIN and isinstance(v, int | float))
    charts: dict[str, list[str]] = {}
    for name in found:
        stem, _, side = name.rpartition("/")
        charts.setdefault(stem if side in SIDES else name, []).append(name)
    order = {name: place for place, name in enumerate(MEASURES)}
    return [
        _chart(_words(key), charts[key], steps, evaluations, smooth)
        for key in sorted(charts, key=lambda key: order.get(key, len(order)))
    ]


def _words(name: str) -> Measure:
    words = figures.words(name)
    return MEASURES.get(name) or Measure(words[:1].upper() + words[1:], words)


def _chart(
    words: Measure,
    fields: Sequence[str],
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    smooth: float,
) -> Markup:
    series = []
    for field in fields:
        side = leaf if (leaf := field.rpartition("/")[2]) in SIDES else ""
        series.append(Series(side or "train", [(s["step"], s[field]) for s in steps if field in s], smooth))
        if held_out := [(e["step"], e[f"val_{field}"]) for e in evaluations if f"val_{field}" in e]:
            series.append(Series(f"{side}, validation" if side else "validation", held_out, dots=True))
    return line_chart(words.title, series, "step", words.unit)
