"""Small corpora for the tests of this folder."""

import json
from pathlib import Path
from typing import Any

from ingot.core.events import Display, EventLog
from ingot.corpus.build import build
from ingot.corpus.settings import CorpusSettings


def settings(sources: Any, **table: Any) -> CorpusSettings:
    """Corpus settings with nothing judged and nothing held out unless asked for."""
    sources = sources if isinstance(sources, list) else [sources]
    sources = [str(s) if isinstance(s, Path) else s for s in sources]
    return CorpusSettings.model_validate({"sources": sources, "quality": "none", "holdout": {"fraction": 0}, **table})


def make(out: Path, sources: Any, **table: Any) -> dict[str, int]:
    """Build a corpus quietly in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    log = EventLog(out / "metrics.jsonl")
    try:
        return build(settings(sources, **table), out, Display(quiet=True), log)
    finally:
        log.close()


def funnel(out: Path) -> dict[str, Any]:
    return json.loads((out / "funnel.json").read_text())


def quarantine(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
