"""Histograms as inline SVG: bars over a measure, with the bounds of rules drawn in."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ingot.report import figures
from ingot.report.html.axes import BOTTOM, HEIGHT, TOP, WIDTH, Frame, draw_axes

BIN = 0.02
"""Width of a bin of a fraction."""


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], bounds: Mapping[str, float]) -> Markup:
    """A histogram.

    Args:
        title: caption of the chart.
        edges: where the bins begin, without the first; a scale that goes beyond 2 is drawn logarithmic.
        counts: number of documents in each bin, one more than edges.
        bounds: name -> x of a dashed vertical line.

    Returns:
        a `<figure>`; it contains "no data yet" without documents.
    """
    used = [i for i, count in enumerate(counts) if count]
    if not used:
        empty = "<figure class=chart><figcaption>{}</figcaption><p class=muted>no document was measured</p></figure>"
        return Markup(empty).format(title)
    log_x = edges[-1] > 2
    borders = _borders(edges, log_x)
    low, high = used[0], used[-1] + 1
    shown = [borders[low], borders[high], *(b for b in bounds.values() if b > 0 or not log_x)]
    widest = max(*shown, min(shown) + (0 if log_x else BIN))  # all documents may have the value 0
    frame = Frame(min(shown), widest, 0.0, float(max(counts)), log_x)
    frame.y0 = 0.0
    bars = [_bar(frame, borders[i], borders[i + 1], counts[i]) for i in used]
    line = "<line class=reference x1={0:.1f} x2={0:.1f} y1={1} y2={2}><title>{3}</title></line>"
    lines = [
        Markup(line).format(frame.x(bound), TOP, HEIGHT - BOTTOM, f"{name}: {bound:g}")
        for name, bound in bounds.items()
        if bound > 0 or not log_x
    ]
    rules = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items())
    body = Markup("").join([draw_axes(frame, title.rpartition(".")[2], "documents"), *bars, *lines])
    figure = (
        "<figure class=chart><figcaption>{title}</figcaption><p class=muted>dashed: {rules}</p>"
        '<svg viewBox="0 0 {w} {h}" role=img aria-label="{summary}">{body}</svg></figure>'
    )
    total = figures.count(sum(counts))
    summary = f"{title}: {total} documents from {borders[low]:.4g} to {borders[high]:.4g}; bounds {rules}"
    return Markup(figure).format(title=title, rules=rules, w=WIDTH, h=HEIGHT, summary=summary, body=body)


def _borders(edges: Sequence[float], log_x: bool) -> list[float]:
    """Both ends of all bins; the first and the last bin, which are open, are as wide as their neighbours."""
    if log_x:
        first = next(edge for edge in edges if edge > 0)
        return [first / 2, *(max(edge, first / 2) for edge in edges), edges[-1] * 1.26]
    return [min(0.0, edges[0]), *edges, edges[-1] + BIN]


def _bar(frame: Frame, low: float, high: float, count: int) -> Markup:
    left, right, top = frame.x(low), frame.x(high), frame.y(count)
    if not math.isfinite(left) or right - left < 0.5:
        right = left + 0.5
    bar = '<rect class="bin" x={:.1f} y={:.1f} width={:.1f} height={:.1f}><title>{}</title></rect>'
    height = max(0.5, HEIGHT - BOTTOM - top)
    return Markup(bar).format(left, HEIGHT - BOTTOM - height, right - left, height, f"{count:,} documents")
