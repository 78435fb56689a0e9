"""The panel of a tokenizer stage: compression of text."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.charts import Series, line_chart
from ingot.report.html.rendering import render


def tokenizer(stage: Path) -> Markup:
    """Metrics of the vocabulary, by source and by script; compression by size; the longest tokens."""
    report = reading.read_json(stage / "report.json") | reading.result(stage)
    formats: figures.Formats = {
        "vocab": ("vocabulary", figures.count),
        "bytes_per_token": ("bytes per token", lambda n: f"{n:.3f}"),
        "tokens_per_word": ("tokens per word", lambda n: f"{n:.3f}"),
        "sample_bytes": ("text measured on", figures.size),
        "unused_ids": ("unused ids", figures.count),
        "unknown_fraction": ("unknown tokens", lambda n: f"{100 * n:.2f} %"),
        "changed_fraction": ("texts changed by encoding and decoding", lambda n: f"{100 * n:.2f} %"),
    }
    pairs = figures.labelled(report, formats)
    tables = [(by, report[f"by_{by}"]) for by in ("source", "script") if len(report.get(f"by_{by}", {})) > 1]
    tokens = [figures.visible(token) for token in report.get("longest_tokens", ())]
    return render("tokenizer.html", pairs=pairs, tables=tables, drawn=_charts(report), tokens=tokens)


def _charts(report: dict[str, Any]) -> list[Markup]:
    rows = report.get("tradeoff", [])
    if len(rows) < 2:
        return []
    compression = [(float(row["vocab"]), row["bytes_per_token"]) for row in rows]
    return [
        line_chart(
            "Compression by vocabulary size",
            [Series("bytes per token", compression, dots=True)],
            "vocabulary",
            "bytes per token",
            log_x=True,
        ),
    ]
