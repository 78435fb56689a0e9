"""Builder of the kind `score`: writes the documents of a corpus again, with a column for each score.

The column of the scorer NAME is `score_NAME`, float32, null where a document has no score: one without words under
counts of words, one without a second token under a model. A score depends on its document alone, and
`similarity` on those before it too.

Scores come first, in arrays of four bytes a document that are saved once a minute, so a killed stage continues with
them; then the documents are read again and written with their scores.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.corpus.contents import plain_texts
from ingot.corpus.documents import (
    SCORE_PREFIX,
    DocumentWriter,
    columns_of,
    document_count,
    document_parts,
    read_documents,
    split_counts,
)
from ingot.corpus.scores.scorer import SCORER, load_scorer
from ingot.corpus.scores.text_measures import TextMeasures, measured_texts
from ingot.stages.job import Job
from ingot.stages.selection.partial import Partial
from ingot.stages.selection.settings import ScoreSettings
from ingot.store.encode import SPLITS

PARTIAL = ".scores"
"""Directory in the stage's with the scores so far."""


def run(job: Job) -> dict[str, Any]:
    """Score all documents of both splits."""
    settings, corpus = job.settings, job.inputs["data"].path
    assert isinstance(settings, ScoreSettings)
    scores = _by_scorers(job, document_count(corpus))
    for name in job.roles("model"):
        scores[name] = _by_model(job, name, settings.device)
    scores |= _by_measures(job, settings)
    names = [*settings.by, *settings.measures]
    for old in document_parts(job.out.path):
        old.unlink()
    writer, counts, at = DocumentWriter(job.out.path), Counter[str](), 0
    for batch in read_documents(corpus, None, columns_of(corpus)):
        table = pa.Table.from_batches([batch])
        for name in names:
            own = scores[name][at : at + batch.num_rows]
            table = table.append_column(SCORE_PREFIX + name, pa.array(own, pa.float32(), mask=np.isnan(own)))
        writer.write(table)
        counts.update(split_counts(np.array(batch["split"].to_pylist()), batch["bytes"].to_numpy()))
        at += batch.num_rows
    writer.flush()
    shutil.rmtree(job.out / PARTIAL, ignore_errors=True)
    known = {name: scores[name][~np.isnan(scores[name])] for name in names}
    means = {f"mean/{name}": float(x.mean(dtype=np.float64)) for name, x in known.items() if len(x)}
    total = {unit: sum(counts[f"{split}_{unit}"] for split in SPLITS) for unit in ("documents", "bytes")}
    unscored = {f"unscored/{name}": at - len(x) for name, x in known.items() if len(x) < at}
    return {**total, **counts, **means, **unscored}


def _by_scorers(job: Job, documents: int) -> dict[str, np.ndarray]:
    """The scores of all documents by each scorer stage, N float32; NaN where there is none."""
    data = job.inputs["data"]
    scorers = {name: load_scorer(stage.path / SCORER) for name, stage in job.roles("scorer").items()}
    scores = {name: np.full(documents, np.nan, np.float32) for name in scorers}
    if not scorers:
        return {}
    partial, at = _partial(job, "scorers", scores), 0
    with job.display.bar("scoring documents", documents, "documents", done=partial.done) as bar:
        for batch in read_documents(data.path, None, ["text"]):
            first, at = at, at + batch.num_rows
            if at <= partial.done:
                continue
            texts = plain_texts(pl.Series(batch["text"]), data.format)
            for name, scorer in scorers.items():
                scores[name][first:at] = scorer.scores(texts)
            partial.add(batch.num_rows)
            bar.advance(batch.num_rows)
    partial.save()
    return scores


def _by_measures(job: Job, settings: ScoreSettings) -> dict[str, np.ndarray]:
    """The measures of all documents, N float32 each; NaN where there is none. They take a moment, so none is saved."""
    if not settings.measures:
        return {}
    measures, data = TextMeasures(settings.measures), job.inputs["data"]
    for stage in job.roles("similar").values():
        for batch in read_documents(stage.path, None, ["text"]):
            measures.compare_with(measured_texts(pl.Series(batch["text"]), stage.format))
    batches = read_documents(data.path, None, ["text"])
    found = [measures(measured_texts(pl.Series(batch["text"]), data.format)) for batch in batches]
    return {name: np.concatenate([one[name] for one in found]).astype(np.float32) for name in settings.measures}


def _by_model(job: Job, name: str, device: str) -> np.ndarray:
    """Bits per byte of all documents under a model, N float32; NaN without a predicted token, and where the model, or
    a document of unknown characters alone, has no finite number."""
    from ingot.evaluate.likelihood import Sums, by_itself, document_rows
    from ingot.stages.models.load import load_model
    from ingot.store.reader import Store
    from ingot.train.settings import rows_per_pass

    loaded = load_model(job.inputs[f"model:{name}"].path, job.display.notify, device, exact=True)
    context, by_split = loaded.config.context, {}
    for split in SPLITS:
        store = Store.open(job.inputs[f"tokens:{name}"].path / split, tokenizer=loaded.tokenizer.fingerprint)
        sums = Sums.zero(store)
        partial = _partial(job, f"{name}-{split}", sums._asdict())
        with job.display.bar(
            f"scoring {split} by {name}", document_rows(store, context), "rows", done=partial.done
        ) as bar:

            def advance(rows: int, partial: Partial = partial, bar: Any = bar) -> None:
                partial.add(rows)
                bar.advance(rows)

            found = by_itself(loaded.model, store, rows_per_pass(context), advance, sums, partial.done)
        partial.save()
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = found.nats / np.log(2) / found.bytes
        by_split[split] = np.where((found.tokens > 0) & np.isfinite(bits), bits, np.nan)
    splits = _splits(job.inputs["data"].path)
    out = np.empty(len(splits), np.float32)
    for split, bits in by_split.items():
        out[splits == split] = bits  # a store has the documents of its split in order
    return out


def _splits(corpus: Path) -> np.ndarray:
    """The split of each document."""
    return np.array(
        [split for batch in read_documents(corpus, None, ["split"]) for split in batch["split"].to_pylist()]
    )


def _partial(job: Job, name: str, arrays: dict[str, np.ndarray]) -> Partial:
    partial = Partial(job.out / PARTIAL / f"{name}.npz", arrays)
    if partial.done:
        job.display.notify(f"{name}: continuing after {partial.done:,}")
    return partial
