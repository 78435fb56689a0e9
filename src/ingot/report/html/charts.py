"""Line charts as inline SVG, which `templates/charts.js` draws again when a reader zooms or changes an axis.

A chart is a `<figure>` with a title, a legend (in HTML, so that it wraps), the SVG, and its points as JSON in an
attribute, so that it is complete where scripts do not run. Long series are thinned to the minimum and maximum of each
bucket, which keeps spikes and a small page. Values that are not finite interrupt the line and are marked at the top.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from ingot.report.html.axes import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Frame, draw_axes

MAX_BUCKETS, MAX_MEAN_BUCKETS = 150, 60
"""Most buckets of a curve, and of a running mean, which has no spikes."""
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve. Curves with equal names share a colour and an entry of the legend."""

    name: str
    points: Sequence[Point]
    smooth: float = 0.0
    """Weight of the running mean, in (0, 1), drawn over the faint raw curve; 0 draws the raw curve only."""
    dots: bool = False
    """Whether each point is marked."""


def line_chart(
    title: str,
    series: Iterable[Series],
    x_label: str,
    y_label: str,
    references: Mapping[str, float] | None = None,
    log_x: bool = False,
    from_zero: bool = False,
) -> Markup:
    """A chart of curves over a common axis.

    Args:
        title: caption of the chart.
        series: curves with at most eight different names; points need not be sorted.
        x_label, y_label: axis names with units.
        references: name -> y value of a dashed horizontal line.
        log_x: start with a logarithmic x axis; a reader can change both axes. Points with x <= 0 are not on it.
        from_zero: start the y axis at 0.

    Returns:
        a `<figure>`; it contains "no data yet" if no series has a finite point.
    """
    references = dict(references or {})
    series = [Series(s.name, sorted(s.points), s.smooth, s.dots) for s in series if s.points]
    names = list(dict.fromkeys(s.name for s in series))
    data = {
        "x": x_label,
        "y": y_label,
        "series": [curve for s in series for curve in _curves(s, names.index(s.name))],
        "references": list(references.values()),
        "logX": log_x,
        "fromZero": from_zero,
    }
    picture = _draw(data)
    if not picture:
        empty = "<figure class=chart><figcaption>{}</figcaption><p class=muted>no data yet</p></figure>"
        return Markup(empty).format(title)
    figure = (
        "<figure class=chart data-chart='{data}'><figcaption>{title}</figcaption>"
        '<div class=controls role=group aria-label="axes of {title}">'
        "<button type=button name=all hidden>show all</button>"
        "<button type=button name=logX>log x</button><button type=button name=logY>log y</button></div>{legend}"
        '<svg viewBox="0 0 {w} {h}" role=img aria-label="{summary}">{picture}</svg><output></output></figure>'
    )
    return Markup(figure).format(
        data=_attribute(json.dumps(data, separators=(",", ":"), ensure_ascii=False)),
        title=title,
        legend=_legend(names, references),
        w=WIDTH,
        h=HEIGHT,
        summary=_summary(title, series),
        picture=picture,
    )


def _draw(data: Mapping[str, Any]) -> Markup:
    """The chart as a reader first sees it; empty without a finite point."""
    curves = [
        {**curve, "points": [p for p in curve["points"] if p[0] > 0 or not data["logX"]]} for curve in data["series"]
    ]
    finite = [p for curve in curves for p in curve["points"] if not isinstance(p[1], str)]
    if not finite:
        return Markup("")
    heights = [y for _, y in finite] + data["references"] + ([0.0] if data["fromZero"] else [])
    every_x = [x for curve in curves for x, _ in curve["points"]]
    frame = Frame(min(every_x), max(every_x), min(heights), max(heights), data["logX"])
    line = "<line class=reference x1={} x2={} y1={:.1f} y2={:.1f} />"
    references = [Markup(line).format(LEFT, WIDTH - RIGHT, frame.y(y), frame.y(y)) for y in data["references"]]
    body = [draw_axes(frame, data["x"], data["y"]), *references, *(_curve(frame, curve) for curve in curves)]
    return Markup("").join(body)


def _curve(frame: Frame, curve: Mapping[str, Any]) -> Markup:
    """A path with a gap at every value that is not finite; a point between two gaps becomes a dot."""
    path, starts, marks = "", True, []
    dots = curve["dots"] or len(curve["points"]) == 1
    for x, y in curve["points"]:
        if isinstance(y, str):
            mark = "<text class=broken x={:.1f} y={} text-anchor=middle>✕</text>"
            marks.append(Markup(mark).format(frame.x(x), TOP + 6))
        else:
            point = f"{frame.x(x):.1f} {frame.y(y):.1f}"
            path += f"M{point}L{point}" if starts else f"L{point}"
            dot = '<circle class="dot s{}" cx={:.1f} cy={:.1f} r=2.5 />'
            marks += [Markup(dot).format(curve["colour"], frame.x(x), frame.y(y))] if dots else []
        starts = isinstance(y, str)
    css = f"line s{curve['colour']}" + (" raw" if curve["raw"] else "")
    return Markup('<path class="{}" d="{}" />').format(css, path) + Markup("").join(marks)


def _attribute(text: str) -> Markup:
    """Text for an attribute in single quotes, in which double quotes, the most frequent signs of JSON, stay short."""
    return Markup(text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;").replace(">", "&gt;"))


def _curves(series: Series, colour: int) -> list[dict[str, Any]]:
    """The curve; with a running mean, the faint raw curve and the mean."""
    curve = {"name": series.name, "colour": colour, "dots": series.dots, "raw": False}
    raw = _rounded(thinned(series.points))
    if not series.smooth:
        return [{**curve, "points": raw}]
    mean = _rounded(thinned(smoothed(series.points, series.smooth), MAX_MEAN_BUCKETS))
    return [{**curve, "raw": True, "points": raw}, {**curve, "name": f"{series.name}, mean", "points": mean}]


def _rounded(points: Sequence[Point]) -> list[list[float | str]]:
    """Points as JSON: five significant digits; a value that is not finite is a string, since JSON has no NaN."""
    return [[_number(x, 7), _number(y, 5) if math.isfinite(y) else str(y)] for x, y in points]


def _number(value: float, digits: int) -> float:
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def _summary(title: str, series: Sequence[Series]) -> str:
    """The first and last value of each curve, for readers who do not see it."""
    ends = {}
    for s in series:
        finite = [y for _, y in s.points if math.isfinite(y)]
        if finite:
            ends.setdefault(s.name, f"{s.name} from {finite[0]:.4g} to {finite[-1]:.4g}")
    return f"{title}: {'; '.join(ends.values())}"


def smoothed(points: Sequence[Point], weight: float) -> Sequence[Point]:
    """Exponential running mean with bias correction; values that are not finite are kept and left out of the mean."""
    if not weight:
        return points
    out, mean, total_weight = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            mean, total_weight = weight * mean + (1 - weight) * y, weight * total_weight + 1 - weight
        out.append((x, mean / total_weight if math.isfinite(y) else y))
    return out


def thinned(points: Sequence[Point], buckets: int = MAX_BUCKETS) -> Sequence[Point]:
    """At most three points per bucket, in order: the minimum, the maximum, and one that is not finite."""
    if len(points) <= 2 * buckets:
        return points
    selected = {0, len(points) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        finite = [i for i in inside if math.isfinite(points[i][1])]
        if finite:
            selected |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        selected |= set([i for i in inside if not math.isfinite(points[i][1])][:1])
    return [points[i] for i in sorted(selected)]


def _legend(names: Sequence[str], references: Mapping[str, float]) -> Markup:
    if len(names) == 1 and not references:
        return Markup("<div class=legend></div>")  # a single curve needs no legend; the space aligns adjacent charts
    entries = [Markup('<span><i class="swatch s{}"></i>{}</span>').format(n, name) for n, name in enumerate(names)]
    entries += [
        Markup("<span><i class='swatch dashed'></i>{} = {}</span>").format(escape(name), f"{height:.4g}")
        for name, height in references.items()
    ]
    return Markup("<div class=legend>{}</div>").format(Markup("").join(entries))
