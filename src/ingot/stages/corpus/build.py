"""Builder of the kind `corpus`."""

from typing import Any

from ingot.corpus import build as corpus
from ingot.corpus.settings import CorpusSettings
from ingot.stages.job import Job


def build(job: Job) -> dict[str, Any]:
    """Read, clean, filter, deduplicate and split the sources."""
    assert isinstance(job.settings, CorpusSettings)
    return corpus.build(job.settings, job.out.path, job.display, job.log)
