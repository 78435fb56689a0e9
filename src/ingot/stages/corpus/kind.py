"""The kind `corpus`: raw text to clean documents."""

from typing import Any

from ingot.corpus.readers.locate import source_digest
from ingot.corpus.settings import CorpusSettings
from ingot.stages.kind import Kind


def _facts(settings: CorpusSettings) -> dict[str, Any]:
    return {"sources": [s.path for s in settings.sources], "format": settings.format}


def _keep_out(settings: CorpusSettings, files: list[str]) -> CorpusSettings:
    is_text, out = settings.format == "text", settings.decontaminate
    if out is None:
        out = files if is_text else []
    counted = settings.overlap_with
    if counted is None:
        counted = [] if is_text else [file for file in files if file not in out]
    return settings.model_copy(update={"decontaminate": out, "overlap_with": counted})


CORPUS = Kind(
    CorpusSettings,
    14,
    "ingot.stages.corpus.build:build",
    ("corpus", "stages/corpus"),
    makes="documents",
    facts=_facts,
    keep_out=_keep_out,
    raw=source_digest,
    panel="ingot.report.html.panels:corpus",
)
