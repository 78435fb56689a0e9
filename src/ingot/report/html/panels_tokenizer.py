"""The panel of a tokenizer stage: what the vocabulary does to text, and what its size costs a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.charts import Series, line_chart
from ingot.report.html.rendering import render
from ingot.tokenizer import vocab_size


def tokenizer(stage: Path) -> Markup:
    """The vocabulary's numbers, by source and by script, its trade-off, its longest tokens."""
    report = reading.read_json(stage / "report.json") | reading.result(stage)
    words: dict[str, tuple[str, Callable[[Any], str]]] = {
        "vocab": ("vocabulary", figures.count),
        "bytes_per_token": ("bytes per token", lambda n: f"{n:.3f}"),
        "tokens_per_word": ("tokens per word", lambda n: f"{n:.3f}"),
        "sample_bytes": ("text measured on", figures.size),
        "unused_ids": ("ids that text never needs", figures.count),
        "unknown_share": ("tokens that are unknown", lambda n: f"{100 * n:.2f} %"),
        "changed_share": ("texts that do not come back", lambda n: f"{100 * n:.2f} %"),
    }
    pairs = figures.named(report, words)
    tables = [(by, report[f"by_{by}"]) for by in ("source", "script") if len(report.get(f"by_{by}", {})) > 1]
    tokens = [figures.visible(token) for token in report.get("longest_tokens", ())]
    return render("tokenizer.html", pairs=pairs, tables=tables, charts=_charts(report), tokens=tokens)


def _charts(report: dict[str, Any]) -> list[Markup]:
    rows = report.get("tradeoff", [])
    if len(rows) < 2:
        return []
    width, layers = vocab_size.FULL
    costs = vocab_size.table([*(row["vocab"] for row in rows), *vocab_size.PRESETS])
    saved = [(float(row["vocab"]), row["bytes_per_token"]) for row in rows]
    taken = [(float(row["vocab"]), 100 * row["share"]) for row in costs]
    gain = Series("bytes per token", saved, dots=True)
    price = Series(f"width {width:,}, {layers} layers", taken, dots=True)
    return [
        line_chart("What a larger vocabulary saves", [gain], "vocabulary", "bytes per token", log_x=True),
        line_chart(
            f"What it costs: share of a model's parameters (width {width:,}, {layers} layers)",
            [price],
            "vocabulary",
            "%",
            log_x=True,
            from_zero=True,
        ),
    ]
