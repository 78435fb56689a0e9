"""The curve of a sweep over one number: the metric by the number, with values that are too low or too high.

A value is too low or too high if the paired difference from the best value, over equal seeds, has a 95 % interval above
0. So a single seed marks nothing, and neither does a difference that could be chance.
"""

import math
from dataclasses import dataclass

from ingot.core.statistics import Interval, paired_difference
from ingot.core.sweep import SEED
from ingot.report.compare.compare import BITS, LOSS, Comparison, Group

MIN_VALUES = 3
"""Values of a curve: with two, one is the best and the other one is not."""


@dataclass(frozen=True)
class Value:
    """One value of the setting."""

    value: float
    metric: Interval
    above_best: Interval | None
    """The paired difference from the best value; None for the best, and without common seeds."""
    verdict: str
    """`best`, `too low`, `too high`, or empty: no clear difference."""


@dataclass(frozen=True)
class Curve:
    """The values of a setting, ascending."""

    setting: str
    metric: str
    values: list[Value]

    @property
    def sentences(self) -> list[str]:
        """What was measured of each value but the best, and whether the best is at an end."""
        best = next(v for v in self.values if v.verdict == "best")
        lines = []
        for v in self.values:
            if v.above_best and v.above_best.low is not None and v.above_best.high is not None:
                i, verdict = v.above_best, v.verdict or "no clear difference"
                numbers = f"{i.mean:+.4f} ({i.low:+.4f} to {i.high:+.4f}) from {best.value:g}, {i.n} seeds"
                lines.append(f"{v.value:g}: {verdict}, {numbers}")
        if best in (self.values[0], self.values[-1]):
            end = "smallest" if best is self.values[0] else "largest"
            lines.append(f"{best.value:g} is best and the {end} value, so a better one may lie beyond it")
        return lines


def setting_curve(comparison: Comparison) -> Curve | None:
    """The curve of a comparison; None unless its groups are the points of a sweep that differ in one number alone.

    The metric is a loss, so lower is better. Groups without a finite one are left out.
    """
    names = {name for g in comparison.trained for name in (g.entries[0].values or {"": None})} - {SEED}
    if len(names) != 1 or comparison.metric not in (LOSS, BITS):
        return None
    (setting,) = names
    groups: dict[float, Group] = {}
    for group in comparison.trained:
        value, mean = (group.entries[0].values or {}).get(setting), group.mean(comparison.metric)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if group.finished and mean and math.isfinite(mean.mean):
            groups[value] = group
    if len(groups) < MIN_VALUES:
        return None
    means = {value: mean for value, group in groups.items() if (mean := group.mean(comparison.metric))}
    best = min(means, key=lambda value: means[value].mean)
    by_seed = {value: group.by_seed(comparison.metric) for value, group in groups.items()}
    above = {v: None if v == best else paired_difference(by_seed[best], by_seed[v]) for v in sorted(groups)}
    values = [Value(v, means[v], i, _verdict(v, best, i)) for v, i in above.items()]
    return Curve(setting, comparison.metric, values)


def _verdict(value: float, best: float, above: Interval | None) -> str:
    if value == best:
        return "best"
    if above is None or above.low is None or above.low <= 0:
        return ""
    return "too low" if value < best else "too high"
