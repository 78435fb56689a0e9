"""Figures of results: the report's line chart as a standalone SVG file, with its own style."""

import re
from collections.abc import Mapping, Sequence

from ingot.report.html.charts import Series, line_chart

Points = Mapping[str, Sequence[tuple[float, float]]]
COLOURS = ("#888", "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")


def chart(title: str, curves: Points, dots: Points, x_label: str, y_label: str) -> str:
    """An SVG document with curves as lines, measured points as dots, and a legend."""
    names = [*curves, *dots]
    series = [Series(name, points) for name, points in curves.items()]
    series += [Series(name, [point], dots=True) for name, points in dots.items() for point in points]
    page = str(line_chart(title, series, x_label, y_label))
    body = page[page.index("<svg") : page.index("</svg>")]
    body = body[body.index(">") + 1 :]
    style = "text{font:11px sans-serif;fill:#444}.grid{stroke:#ddd}.axis,.tick{stroke:#888}.hover{fill:none}"
    for number, colour in enumerate(COLOURS):
        style += f".s{number}.line{{stroke:{colour};fill:none;stroke-width:1.5}}.dot.s{number}{{fill:{colour}}}"
    legend = "".join(
        f'<circle cx="{64 + 208 * (i % 2)}" cy="{282 + 16 * (i // 2)}" r="4" fill="{COLOURS[i]}"/>'
        f'<text x="{74 + 208 * (i % 2)}" y="{286 + 16 * (i // 2)}">{name}</text>'
        for i, name in enumerate(names)
    )
    height = 284 + 16 * -(-len(names) // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {height}" width="640"><title>{title}</title>'
        f'<style>{style}</style><rect width="480" height="{height}" fill="#fff"/>{_quoted(body)}{legend}</svg>\n'
    )


def _quoted(body: str) -> str:
    """The HTML with quoted attributes, as XML requires."""
    return re.sub(r"<[^>]+>", lambda tag: re.sub(r'=([^\s">/][^\s>]*?)(?=[\s>]|/>)', r'="\1"', tag[0]), body)
