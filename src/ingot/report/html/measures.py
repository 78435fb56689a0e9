"""Charts of the metrics that an objective logs besides its loss: their titles and units.

A metric that is not listed gets a chart titled by its name, so a new objective needs no entry.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ingot.report import figures
from ingot.report.html.charts import Series, line_chart

COMMON = frozenset(
    {"step", "time", "attempt", "event", "loss_nats", "loss", "grad_norm", "lr", "tokens", "tokens_seen", "tok_s"}
)
"""Fields of every step's event; the panel of train stages charts them or needs no chart."""
SIDES = ("chosen", "rejected")
"""Sides of a pair; a chart shows both."""


class Measure(NamedTuple):
    """Title and unit of a chart."""

    title: str
    unit: str


MEASURES = {
    "reward": Measure("Reward", "mean over answers"),
    "gold_reward": Measure("Gold reward", "mean over answers"),
    "reward_std": Measure("Spread of the reward", "standard deviation over answers"),
    "kl_nats": Measure("KL from the reference", "nats per answer"),
    "beta": Measure("KL coefficient", "beta"),
    "completion_tokens": Measure("Length of an answer", "tokens"),
    "truncated_fraction": Measure("Truncated answers", "fraction"),
    "unscored_fraction": Measure("Answers without a reward", "fraction"),
    "groups_without_signal": Measure("Groups of equal rewards", "fraction"),
    "entropy_nats": Measure("Entropy", "nats per token"),
    "approx_kl": Measure("KL from the sampling policy", "nats per token"),
    "clip_fraction": Measure("Clipped ratios", "fraction of tokens"),
    "explained_variance": Measure("Explained variance of the value function", "fraction"),
    "value_loss": Measure("Value loss", "squared error"),
    "weighted_logp": Measure("ln p times advantage", "nats per token"),
    "first_ratio": Measure("Ratio at the first update", "1 if correct"),
    "sampler_gap": Measure("ln p of sampler and trainer, difference", "nats per token"),
    "accuracy": Measure("Accuracy on pairs", "fraction"),
    "rewards/accuracy": Measure("Accuracy on pairs", "fraction"),
    "margin": Measure("Reward of chosen minus rejected", "reward"),
    "rewards/margin": Measure("Implicit reward of chosen minus rejected", "reward"),
    "rewards": Measure("Implicit reward", "beta times log-ratio"),
    "logps": Measure("ln p of an answer", "nats"),
    "kl_zero": Measure("Reference point of KTO", "nats per answer"),
    "replay_nats": Measure("Loss of replayed rows", "nats per token"),
    "replay_fraction": Measure("Replayed rows", "fraction of tokens"),
    "tokens": Measure("Length of an answer", "tokens"),
}
"""Metric -> title and unit, in the order of the charts; `NAME/chosen` and `NAME/rejected` are listed as NAME."""


def measures(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], smooth: float
) -> list[Markup]:
    """A chart for each metric of the objective, with its held-out values if there are any.

    Args:
        steps, evaluations: events of a stage.
        smooth: weight of the running mean.
    """
    names = dict.fromkeys(n for s in steps for n, v in s.items() if n not in COMMON and isinstance(v, int | float))
    charts: dict[str, list[str]] = {}
    for name in names:
        stem, _, side = name.rpartition("/")
        charts.setdefault(stem if side in SIDES else name, []).append(name)
    order = {name: number for number, name in enumerate(MEASURES)}
    return [
        _chart(_measure(key), charts[key], steps, evaluations, smooth)
        for key in sorted(charts, key=lambda key: order.get(key, len(order)))
    ]


def _measure(name: str) -> Measure:
    heading = figures.heading(name)
    return MEASURES.get(name) or Measure(heading[:1].upper() + heading[1:], heading)


def _chart(
    measure: Measure,
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
    return line_chart(measure.title, series, "step", measure.unit)
