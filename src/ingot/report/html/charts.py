"""Line charts as inline SVG: one function, no script, colours from the page's style sheet.

A chart is a `<figure>`: title, legend (HTML, so that it wraps and never overlaps), the SVG. Long series are thinned to
the lowest and highest value of each of some 240 buckets, so a spike survives and the page stays small. Values that are
not finite break the line and are marked at the top: a NaN is the one point of a curve that nobody may miss.

Rejected: a plotting library (each is larger than the rest of the base install's report) and a script in the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ingot.report import figures
from ingot.report.html.axes import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Frame, draw_axes

BUCKETS, HOVERS, MARKS = 240, 40, 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve; `smooth` in (0, 1) draws its running mean over the faint raw curve, `dots` marks each point.

    Curves of one name share a colour and an entry of the legend.
    """

    name: str
    points: Sequence[Point]
    smooth: float = 0.0
    dots: bool = False


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
        title: above the chart.
        series: at most eight names; points need not be sorted.
        x_label, y_label: axis names with units.
        references: name -> height of a dashed horizontal line.
        log_x: logarithmic steps; points at 0 or below are left out.
        from_zero: the y axis starts at 0.

    Returns:
        a `<figure>`; one that says "no data yet" where no series has a finite point.
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
    for one in series:
        body.append(_curve(frame, one, names.index(one.name)))
    svg = Markup('<svg viewBox="0 0 {} {}" role=img aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, title, Markup("").join(body)
    )
    figure = Markup("<figure class=chart><figcaption>{}</figcaption>{}{}</figure>")
    return figure.format(title, _legend(names, references), svg)


def _curve(frame: Frame, series: Series, number: int) -> Markup:
    drawn = smoothed(series.points, series.smooth)
    parts = []
    if series.smooth:
        parts.append(_path(frame, series.points, f"line s{number} raw"))
    parts.append(_path(frame, drawn, f"line s{number}"))
    good = [p for p in drawn if math.isfinite(p[1])]
    for x, y in good if series.dots or len(good) == 1 else []:
        parts.append(
            Markup('<circle class="dot s{}" cx={:.1f} cy={:.1f} r=2.5 />').format(number, frame.x(x), frame.y(y))
        )
    for x, y in figures.spread(good, HOVERS):
        circle = "<circle class=hover cx={:.1f} cy={:.1f} r=7><title>{}, {}: {}</title></circle>"
        parts.append(Markup(circle).format(frame.x(x), frame.y(y), series.name, f"{x:,.6g}", f"{y:.5g}"))
    for x, y in [p for p in series.points if not math.isfinite(p[1])][:MARKS]:
        mark = "<text class=broken x={:.1f} y={} text-anchor=middle>✕<title>{}, {}: {}</title></text>"
        parts.append(Markup(mark).format(frame.x(x), TOP + 6, series.name, f"{x:,.6g}", y))
    return Markup("").join(parts)


def _path(frame: Frame, points: Sequence[Point], css: str) -> Markup:
    """A path with a gap at every value that is not finite; a point between two gaps is a dot (round line ends)."""
    pieces, pen = [], "M"
    for x, y in thinned(points):
        if math.isfinite(y):
            place = f"{frame.x(x):.1f} {frame.y(y):.1f}"
            pieces.append(f"M{place}L{place}" if pen == "M" else f"L{place}")
            pen = "L"
        else:
            pen = "M"
    return Markup('<path class="{}" d="{}" />').format(css, "".join(pieces))


def smoothed(points: Sequence[Point], weight: float) -> Sequence[Point]:
    """Exponential running mean without the bias towards its start; values that are not finite stay and are skipped."""
    if not weight:
        return points
    out, mean, seen = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            mean, seen = weight * mean + (1 - weight) * y, weight * seen + 1 - weight
        out.append((x, mean / seen if math.isfinite(y) else y))
    return out


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> Sequence[Point]:
    """At most three points a bucket: its lowest, its highest, and one that is not finite, in their order."""
    if len(points) <= 2 * buckets:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        finite = [i for i in inside if math.isfinite(points[i][1])]
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        kept |= set([i for i in inside if not math.isfinite(points[i][1])][:1])
    return [points[i] for i in sorted(kept)]


def _legend(names: Sequence[str], references: Mapping[str, float]) -> Markup:
    if len(names) == 1 and not references:
        return Markup("<div class=legend></div>")  # the title says it; the room keeps neighbours aligned
    entries = [Markup('<span><i class="swatch s{}"></i>{}</span>').format(n, name) for n, name in enumerate(names)]
    entries += [
        Markup("<span><i class='swatch dashed'></i>{} = {}</span>").format(escape(name), f"{height:.4g}")
        for name, height in references.items()
    ]
    return Markup("<div class=legend>{}</div>").format(Markup("").join(entries))
