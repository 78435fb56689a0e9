"""Line charts as inline SVG, without scripts; colours come from the page's style sheet.

A chart is a `<figure>` with a title, a legend (in HTML, so that it wraps) and the SVG. Long series are thinned to the
minimum and maximum of each bucket, which keeps spikes and a small page. Values that are not finite interrupt the line
and are marked at the top.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ingot.report import figures
from ingot.report.html.axes import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Frame, draw_axes

MAX_BUCKETS, MAX_HOVERS, MAX_MARKS = 240, 40, 20
"""Most buckets of a curve, points with a tooltip, and marked values that are not finite."""
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
    """Draw curves over a common axis.

    Args:
        title: caption of the chart.
        series: curves with at most eight different names; points need not be sorted.
        x_label, y_label: axis names with units.
        references: name -> y value of a dashed horizontal line.
        log_x: use a logarithmic x axis; points with x <= 0 are left out.
        from_zero: start the y axis at 0.

    Returns:
        a `<figure>`; it contains "no data yet" if no series has a finite point.
    """
    references = dict(references or {})
    series = [Series(s.name, sorted(p for p in s.points if not log_x or p[0] > 0), s.smooth, s.dots) for s in series]
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return Markup("<figure class=chart><figcaption>{}</figcaption><p class=muted>no data yet</p></figure>").format(
            title
        )
    heights = [y for _, y in finite] + list(references.values()) + ([0.0] if from_zero else [])
    every_x = [x for s in series for x, _ in s.points]
    frame = Frame(min(every_x), max(every_x), min(heights), max(heights), log_x)
    body = [draw_axes(frame, x_label, y_label)]
    for name, height in references.items():
        y = frame.y(height)
        line = "<line class=reference x1={} x2={} y1={:.1f} y2={:.1f}><title>{}: {}</title></line>"
        body.append(Markup(line).format(LEFT, WIDTH - RIGHT, y, y, name, f"{height:.4g}"))
    names = list(dict.fromkeys(s.name for s in series))
    body += [_curve(frame, s, names.index(s.name)) for s in series]
    svg = Markup('<svg viewBox="0 0 {} {}" role=img aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, title, Markup("").join(body)
    )
    figure = Markup("<figure class=chart><figcaption>{}</figcaption>{}{}</figure>")
    return figure.format(title, _legend(names, references), svg)


def _curve(frame: Frame, series: Series, number: int) -> Markup:
    points = smoothed(series.points, series.smooth)
    parts = []
    if series.smooth:
        parts.append(_path(frame, series.points, f"line s{number} raw"))
    parts.append(_path(frame, points, f"line s{number}"))
    finite = [p for p in points if math.isfinite(p[1])]
    for x, y in finite if series.dots or len(finite) == 1 else []:
        parts.append(
            Markup('<circle class="dot s{}" cx={:.1f} cy={:.1f} r=2.5 />').format(number, frame.x(x), frame.y(y))
        )
    for x, y in figures.evenly_spaced(finite, MAX_HOVERS):
        circle = "<circle class=hover cx={:.1f} cy={:.1f} r=7><title>{}, {}: {}</title></circle>"
        parts.append(Markup(circle).format(frame.x(x), frame.y(y), series.name, f"{x:,.6g}", f"{y:.5g}"))
    for x, y in [p for p in series.points if not math.isfinite(p[1])][:MAX_MARKS]:
        mark = "<text class=broken x={:.1f} y={} text-anchor=middle>✕<title>{}, {}: {}</title></text>"
        parts.append(Markup(mark).format(frame.x(x), TOP + 6, series.name, f"{x:,.6g}", y))
    return Markup("").join(parts)


def _path(frame: Frame, points: Sequence[Point], css: str) -> Markup:
    """A path with a gap at every value that is not finite; a point between two gaps becomes a dot."""
    pieces, starts = [], True
    for x, y in thinned(points):
        if math.isfinite(y):
            point = f"{frame.x(x):.1f} {frame.y(y):.1f}"
            pieces.append(f"M{point}L{point}" if starts else f"L{point}")
        starts = not math.isfinite(y)
    return Markup('<path class="{}" d="{}" />').format(css, "".join(pieces))


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
