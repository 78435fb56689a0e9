"""The kind `corpus`: raw text to clean documents."""

from typing import Any

from ingot.corpus.readers.locate import source_digest
from ingot.corpus.settings import CorpusSettings
from ingot.stages.kind import Kind


def _facts(settings: CorpusSettings) -> dict[str, Any]:
    return {"sources": [s.path for s in settings.sources], "format": settings.format}


CORPUS = Kind(
    CorpusSettings,
    11,
    "ingot.stages.corpus.build:build",
    ("corpus", "stages/corpus"),
    makes="documents",
    facts=_facts,
    raw=source_digest,
    panel="ingot.report.html.panels:corpus",
)
