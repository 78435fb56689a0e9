"""The graph of stages as an inline SVG: boxes in columns, inputs to the left of the stages that read them.

Only the transitive reduction is drawn, because a picture with every edge is unreadable; the lineage table lists all
edges. A stage is as far right as its readers allow, an edge across several columns passes through a row of each, and
rows are ordered by the mean row of their neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from ingot.core.errors import shortened

BOX_WIDTH, GAP, ROW_HEIGHT, BOX_HEIGHT, PADDING = 142, 32, 80, 64, 6
"""Sizes in pixels."""
SWEEPS = 4
"""Passes that order the rows."""
MIN_SCALE = 0.75
"""The picture shrinks to at most this fraction of its size to fit the page, and then scrolls."""


@dataclass(frozen=True)
class Box:
    """A stage in the picture."""

    name: str
    kind: str
    state: str
    """A value of `page.STATES`; it also selects the colour."""
    note: str
    inputs: tuple[str, ...]
    link: bool = True
    """Whether the page has a section of the stage, which the box then leads to."""


def draw(boxes: Sequence[Box]) -> Markup:
    """Draw stages, sorted such that inputs come before the stages that read them."""
    inputs = reduced({b.name: b.inputs for b in boxes})
    column = columns(inputs)
    chains = [_chain(source, name, column) for name, sources in inputs.items() for source in sources]
    table = _ordered(column, chains)
    rows = max(map(len, table), default=1)
    positions = {
        stop: (PADDING + c * (BOX_WIDTH + GAP), PADDING + (r + (rows - len(stops)) / 2) * ROW_HEIGHT)
        for c, stops in enumerate(table)
        for r, stop in enumerate(stops)
    }
    width = 2 * PADDING + max(1, len(table)) * (BOX_WIDTH + GAP) - GAP
    height = 2 * PADDING + rows * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT)
    body = [_edge([positions[stop] for stop in chain]) for chain in chains]
    body += [_box(b, *positions[b.name]) for b in boxes]
    svg = (
        '<div class=scroll><svg class=graph viewBox="0 0 {w} {h}" style="width:{w}px;min-width:{least}px" role=group '
        'aria-label="graph of stages"><defs><marker id=arrow viewBox="0 0 8 8" refX=7 refY=4 markerWidth=7 '
        'markerHeight=7 orient=auto><path d="M0 0L8 4L0 8z" class=head /></marker></defs>{body}</svg></div>'
    )
    return Markup(svg).format(w=width, h=height, least=round(MIN_SCALE * width), body=Markup("").join(body))


def reduced(inputs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The transitive reduction: edges that are implied by others are left out."""
    ancestors: dict[str, set[str]] = {}
    for name, sources in inputs.items():
        ancestors[name] = {a for s in sources for a in ancestors[s] | {s}}
    return {
        name: [s for s in dict.fromkeys(sources) if not any(s in ancestors[other] for other in sources)]
        for name, sources in inputs.items()
    }


def columns(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The column of each stage: right of all its inputs, and as close to its first reader as possible."""
    column: dict[str, int] = {}
    for name, sources in inputs.items():
        column[name] = 1 + max((column[s] for s in sources), default=-1)
    for name in reversed(list(inputs)):
        readers = [column[r] for r, sources in inputs.items() if name in sources]
        column[name] = min(readers, default=column[name] + 1) - 1
    return column


Stop = str | tuple[str, str, int]
"""An entry of a column: a stage, or an edge (source, reader, column) that passes through."""


def _chain(source: str, reader: str, column: Mapping[str, int]) -> list[Stop]:
    """An edge as its stops, one in every column."""
    return [source, *((source, reader, c) for c in range(column[source] + 1, column[reader])), reader]


def _ordered(column: Mapping[str, int], chains: Sequence[Sequence[Stop]]) -> list[list[Stop]]:
    """The stops of each column, sorted repeatedly by the mean row of their neighbours."""
    column_of: dict[Stop, int] = {**column}
    neighbours: dict[Stop, list[Stop]] = {name: [] for name in column}
    for chain in chains:
        for number, stop in enumerate(chain, column[str(chain[0])]):
            column_of[stop] = number
        for left, right in pairwise(chain):
            neighbours.setdefault(left, []).append(right)
            neighbours.setdefault(right, []).append(left)
    table = [[s for s, c in column_of.items() if c == k] for k in range(1 + max(column_of.values(), default=-1))]
    row = {s: r - len(stops) / 2 for stops in table for r, s in enumerate(stops)}

    def mean_row(stop: Stop) -> float:
        near = neighbours[stop]
        return sum(row[n] for n in near) / len(near) if near else row[stop]

    for _ in range(SWEEPS):
        for stops in table:
            stops.sort(key=mean_row)
            row |= {s: r - len(stops) / 2 for r, s in enumerate(stops)}
    return table


def _edge(stops: Sequence[tuple[float, float]]) -> Markup:
    """A smooth line from the right side of the first stop to the left side of the last one."""
    path = ""
    for (x0, y0), (x1, y1) in pairwise(stops):
        start, end, y0, y1 = x0 + BOX_WIDTH, x1, y0 + BOX_HEIGHT / 2, y1 + BOX_HEIGHT / 2
        middle = (start + end) / 2
        path += f"{'L' if path else 'M'}{start:.0f} {y0:.0f}"
        path += f"C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {end:.0f} {y1:.0f}"
    return Markup('<path class=edge d="{}" marker-end="url(#arrow)" />').format(path)


def _box(box: Box, x: float, y: float) -> Markup:
    lines = (("name", box.name), ("kind", box.kind), ("state", f"{box.state} {box.note}".strip()))
    texts = [
        Markup("<text class={} x={} y={}>{}</text>").format(css, x + 14, y + 19 + 17 * n, shortened(text, 18))
        for n, (css, text) in enumerate(lines)
    ]
    picture = (
        '<g class="box {css}"><title>{name}: {kind}, {state} {note}</title>'
        "<rect x={x} y={y} width={w} height={h} rx=6 />"
        "<rect class=stripe x={x} y={y} width=5 height={h} rx=2 />{texts}</g>"
    )
    drawn = Markup(picture).format(
        css=box.state.replace(" ", "-"),
        name=box.name,
        kind=box.kind,
        state=box.state,
        note=box.note,
        x=x,
        y=y,
        w=BOX_WIDTH,
        h=BOX_HEIGHT,
        texts=Markup("").join(texts),
    )
    return Markup('<a href="#{}">{}</a>').format(box.name, drawn) if box.link else drawn
