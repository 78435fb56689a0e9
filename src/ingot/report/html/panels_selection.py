"""The panel of a select stage: what was kept and why the rest was not, and histograms of the scores."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.charts import Series, line_chart
from ingot.report.html.rendering import render


def select(stage: Path) -> Markup:
    """Documents in, dropped by reason, by phase; a histogram of each score, with its thresholds named."""
    funnel = reading.read_json(stage / "funnel.json")
    if not funnel:
        return render("tokenizer.html", pairs=[], tables=[], drawn=[], tokens=[])
    rows = {"in": funnel["in"], **funnel["dropped"], "kept": funnel["kept"]}
    rows |= {f"phase {name}": counts for name, counts in funnel["phases"].items()}
    pairs = [
        (name, f"{counts['documents']:,} documents, {figures.size(counts['bytes'])}") for name, counts in rows.items()
    ]
    drawn = [_histogram(name, score) for name, score in funnel["scores"].items()]
    return render("tokenizer.html", pairs=pairs, tables=[], drawn=drawn, tokens=[])


def _histogram(name: str, score: dict[str, Any]) -> Markup:
    edges, counts = score["edges"], score["counts"]
    points = [(x, float(n)) for low, high, n in zip(edges, edges[1:], counts, strict=False) for x in (low, high)]
    rules = ", ".join(f"{rule} {side} {value:.4g}" for rule, side, value in score["thresholds"])
    return line_chart(f"{name}" + (f" ({rules})" if rules else ""), [Series("documents", points)], name, "documents")
