"""Charts of the metrics that an objective logs besides its loss: their titles and units.

A metric that is not listed gets a chart titled by its name, so a new objective needs no entry.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ingot.report import figures
from ingot.report.html.charts import Series, line_chart

COMMON = frozenset(
    {
        "step",
        "time",
        "attempt",
        "event",
        "loss_nats",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_seen",
        "tok_s",
        "eta_s",
    }
)
"""Fields of every step's event; the panel of train stages charts them or needs no chart."""
SIDES = ("chosen", "rejected")
"""Sides of a pair; a chart shows both."""


class Measure(NamedTuple):
    """Title and unit of a chart."""

    title: str
    unit: str


MEASURES = {
    "reward": Measure("Reward", "mean over completions"),
    "gold_reward": Measure("Gold reward", "mean over completions"),
    "reward_std": Measure("Reward standard deviation", "over completions"),
    "kl_nats": Measure("KL to the reference", "nats per completion"),
    "beta": Measure("KL coefficient", "beta"),
    "completion_tokens": Measure("Completion length", "tokens"),
    "truncated_fraction": Measure("Truncated completions", "fraction"),
    "unscored_fraction": Measure("Completions without a reward", "fraction"),
    "groups_without_signal": Measure("Groups with equal rewards", "fraction"),
    "entropy_nats": Measure("Entropy", "nats per token"),
    "approx_kl": Measure("KL to the sampling policy", "nats per token"),
    "clip_fraction": Measure("Clip fraction", "fraction of tokens"),
    "explained_variance": Measure("Value explained variance", "fraction"),
    "value_loss": Measure("Value loss", "squared error"),
    "weighted_logp": Measure("Log-probability times advantage", "nats per token"),
    "first_ratio": Measure("Probability ratio at the first update", "1 if correct"),
    "sampler_gap": Measure("Log-probability gap of sampler and trainer", "nats per token"),
    "accuracy": Measure("Reward accuracy", "fraction"),
    "rewards/accuracy": Measure("Reward accuracy", "fraction"),
    "margin": Measure("Reward margin", "chosen minus rejected"),
    "rewards/margin": Measure("Reward margin", "chosen minus rejected, implicit reward"),
    "rewards": Measure("Implicit reward", "beta times log-ratio"),
    "logps": Measure("Log-probability of completions", "nats per completion"),
    "kl_zero": Measure("KTO reference point", "nats per completion"),
    "replay_nats": Measure("Loss of replayed rows", "nats per token"),
    "replay_fraction": Measure("Replayed rows", "fraction of tokens"),
    "tokens": Measure("Completion length", "tokens"),
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
