"""The axes of a chart: the mapping of values to SVG coordinates, round tick values, and drawing."""

import math

from markupsafe import Markup

WIDTH, HEIGHT = 480, 260
"""Size of a chart in SVG units."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 22, 40
"""Margins of the plot area in SVG units."""


class Frame:
    """Maps values in x0 .. x1, y0 .. y1 (with a margin) to SVG coordinates."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, log_x: bool):
        self.log_x = log_x
        self.x0, self.x1 = (x0, x1) if x1 > x0 else (x0 * 0.5, x0 * 1.5) if x0 else (-1.0, 1.0)
        margin = (y1 - y0) * 0.05 or abs(y0) * 0.1 or 1.0
        self.y0, self.y1 = y0 - (margin if y0 else 0.0), y1 + margin
        self._start, self._end = self._scale_x(self.x0), self._scale_x(self.x1)

    def _scale_x(self, x: float) -> float:
        return math.log10(x) if self.log_x else x

    def x(self, value: float) -> float:
        return LEFT + (self._scale_x(value) - self._start) / (self._end - self._start) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.y1 - value) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Round values within low .. high, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max_ticks
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(
        m * scale
        for m in (1, 2, 5, 10, 20)
        if math.floor(high / (m * scale)) - math.ceil(low / (m * scale)) < max_ticks
    )
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within low .. high, and 2 and 5 times these if the range is small."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    return [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high] or [low, high]


def tick_labels(values: list[float]) -> list[str]:
    """Short distinct labels: 0, 0.5, 2k, 1.5M, 3e-4; values that are close get more digits."""
    labels: list[str] = []
    for digits in range(2, 16):
        labels = [_label(value, digits) for value in values]
        if len(set(labels)) == len(set(values)):
            break
    return labels


def _label(value: float, digits: int) -> str:
    if value and (abs(value) < 1e-2 or abs(value) >= 1e9):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').removesuffix('.')}e{int(exponent)}"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.{max(6, digits)}g}{unit}"
    return f"{value:.{max(6, digits)}g}"


def draw_axes(frame: Frame, x_label: str, y_label: str) -> Markup:
    """The axes with grid lines, ticks and labels, as SVG elements."""
    parts = []
    y_ticks = ticks(frame.y0, frame.y1, max_ticks=6)
    for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = frame.y(value)
        line = "<line class=grid x1={} x2={} y1={:.1f} y2={:.1f} /><text x={} y={:.1f} text-anchor=end>{}</text>"
        parts.append(Markup(line).format(LEFT, WIDTH - RIGHT, y, y, LEFT - 6, y + 4, label))
    x_ticks = log_ticks(frame.x0, frame.x1) if frame.log_x else ticks(frame.x0, frame.x1, max_ticks=7)
    for value, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x = frame.x(value)
        line = "<line class=tick x1={:.1f} x2={:.1f} y1={} y2={} /><text x={:.1f} y={} text-anchor=middle>{}</text>"
        bottom = HEIGHT - BOTTOM
        parts.append(Markup(line).format(x, x, bottom, bottom + 4, x, bottom + 17, label))
    base = "<line class=axis x1={} x2={} y1={} y2={} />"
    parts.append(Markup(base).format(LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, HEIGHT - BOTTOM))
    names = "<text class=label x=2 y=12>{}</text><text class=label x={} y={} text-anchor=end>{}</text>"
    parts.append(Markup(names).format(y_label, WIDTH - RIGHT, HEIGHT - 6, x_label))
    return Markup("").join(parts)
