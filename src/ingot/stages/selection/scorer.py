"""Builder of the kind `scorer`."""

from typing import Any

from ingot.corpus.scores.scorer import SCORER, Corpus, save_scorer, train
from ingot.stages.job import Job
from ingot.stages.selection.settings import ScorerSettings


def run(job: Job) -> dict[str, Any]:
    """Train a scorer on the examples, measure it on those held out, and save it."""
    settings = job.settings
    assert isinstance(settings, ScorerSettings)
    good, bad = ([Corpus(s.path, s.format) for s in job.roles(side).values()] for side in ("good", "bad"))
    scorer, result = train(settings.type, settings.measure, good, bad)
    save_scorer(job.out / SCORER, settings.type, scorer)
    if "auc" in result:
        job.display.notify(
            f"AUC {result['auc']:.3f} on {result['held_out_documents']:,} held-out documents that it has not seen"
        )
    return result
