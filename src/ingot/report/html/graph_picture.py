"""The stages and what they read, as an inline SVG: boxes in columns, inputs to the left of their readers.

An edge that follows from others is left out (the tokenizer of a model's data is the model's tokenizer), because with
every edge drawn the picture says nothing; the lineage table lists them all. A stage stands as far right as its readers
allow, edges across several columns get a place in each, and rows are ordered by the mean of their neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from ingot.core.errors import shortened

BOX, GAP, ROW, TALL, PAD = 142, 32, 80, 64, 6
_SWEEPS = 4
_SHRUNK = 0.75
"""Of its own size, how small a picture may become to fit the page; words stay legible, and then it scrolls."""


@dataclass(frozen=True)
class Box:
    """A stage in the picture."""

    name: str
    kind: str
    state: str
    """done | running | interrupted | not run: the words of the page, and its colours."""
    note: str
    inputs: tuple[str, ...]


def draw(boxes: Sequence[Box]) -> Markup:
    """The picture of stages given with inputs before their readers."""
    inputs = reduced({b.name: b.inputs for b in boxes})
    column = columns(inputs)
    chains = [_chain(source, name, column) for name, sources in inputs.items() for source in sources]
    table = _ordered(column, chains)
    tallest = max(map(len, table), default=1)
    places = {
        stop: (PAD + c * (BOX + GAP), PAD + (r + (tallest - len(stops)) / 2) * ROW)
        for c, stops in enumerate(table)
        for r, stop in enumerate(stops)
    }
    width = 2 * PAD + max(1, len(table)) * (BOX + GAP) - GAP
    height = 2 * PAD + tallest * ROW - (ROW - TALL)
    body = [_edge([places[stop] for stop in chain]) for chain in chains]
    body += [_box(b, *places[b.name]) for b in boxes]
    svg = (
        '<div class=scroll><svg class=graph viewBox="0 0 {w} {h}" style="width:{w}px;min-width:{least}px" role=img '
        'aria-label="graph of stages"><defs><marker id=arrow viewBox="0 0 8 8" refX=7 refY=4 markerWidth=7 '
        'markerHeight=7 orient=auto><path d="M0 0L8 4L0 8z" class=head /></marker></defs>{body}</svg></div>'
    )
    return Markup(svg).format(w=width, h=height, least=round(_SHRUNK * width), body=Markup("").join(body))


def reduced(inputs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The edges that do not follow from others (transitive reduction)."""
    above: dict[str, set[str]] = {}
    for name, sources in inputs.items():
        above[name] = {a for s in sources for a in above[s] | {s}}
    return {
        name: [s for s in dict.fromkeys(sources) if not any(s in above[other] for other in sources)]
        for name, sources in inputs.items()
    }


def columns(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Column of each stage: right of all its inputs, then as close to its first reader as possible."""
    column: dict[str, int] = {}
    for name, sources in inputs.items():
        column[name] = 1 + max((column[s] for s in sources), default=-1)
    for name in reversed(list(inputs)):
        readers = [column[r] for r, sources in inputs.items() if name in sources]
        column[name] = min(readers, default=column[name] + 1) - 1
    return column


Stop = str | tuple[str, str, int]
"""What takes up a row of a column: a stage, or an edge that passes through it."""


def _chain(source: str, reader: str, column: Mapping[str, int]) -> list[Stop]:
    """An edge with its stop in every column."""
    return [source, *((source, reader, c) for c in range(column[source] + 1, column[reader])), reader]


def _ordered(column: Mapping[str, int], chains: Sequence[Sequence[Stop]]) -> list[list[Stop]]:
    """Columns of stops, after a few sweeps that put each stop at the mean row of its neighbours."""
    stops: dict[Stop, int] = {**column}
    near: dict[Stop, list[Stop]] = {name: [] for name in column}
    for chain in chains:
        for place, stop in enumerate(chain, column[str(chain[0])]):
            stops[stop] = place
        for one, two in pairwise(chain):
            near.setdefault(one, []).append(two)
            near.setdefault(two, []).append(one)
    table = [[s for s, c in stops.items() if c == k] for k in range(1 + max(stops.values(), default=-1))]
    row = {s: r - len(names) / 2 for names in table for r, s in enumerate(names)}
    for _ in range(_SWEEPS):
        for names in table:
            names.sort(key=lambda s: sum(row[n] for n in near[s]) / len(near[s]) if near[s] else row[s])
            row |= {s: r - len(names) / 2 for r, s in enumerate(names)}
    return table


def _edge(stops: Sequence[tuple[float, float]]) -> Markup:
    """A smooth line from the right side of the first stop to the left side of the last."""
    path = ""
    for (x0, y0), (x1, y1) in pairwise(stops):
        start, end, y0, y1 = x0 + BOX, x1, y0 + TALL / 2, y1 + TALL / 2
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
    return Markup(picture).format(
        css=box.state.replace(" ", "-"),
        name=box.name,
        kind=box.kind,
        state=box.state,
        note=box.note,
        x=x,
        y=y,
        w=BOX,
        h=TALL,
        texts=Markup("").join(texts),
    )
