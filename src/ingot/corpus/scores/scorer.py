"""A trained scorer of documents: its training from corpora, its quality on held-out documents, and its file.

Examples are documents of corpus stages. The training splits train; of the held-out splits one half (by the hash of the
document) calibrates and the other half measures. So a document that is in the result has influenced nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import polars as pl
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ingot.core.artifact import atomic_write, damaged
from ingot.core.errors import UserError
from ingot.corpus.contents import plain_texts
from ingot.corpus.documents import Split, read_documents
from ingot.corpus.pieces import mix
from ingot.corpus.readers.fields import Format
from ingot.corpus.scores import classifier, ngram
from ingot.corpus.scores.calibration import auc, calibration_error, log_loss
from ingot.corpus.scores.settings import Measure

SCORER = "scorer.safetensors"
"""File of a scorer stage."""
MAX_BYTES = 16_000_000
"""Text of each side that is trained on; a scorer learns little from more."""
LEAST_HELD_OUT = 20
"""Held-out documents of each side; fewer measure nothing."""


class Scorer(Protocol):
    """Gives a document a score that depends on the document alone."""

    @property
    def measure(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    def scores(self, texts: pl.Series) -> np.ndarray:
        """The score of each text, float32; NaN where it has none."""
        ...

    def tensors(self) -> dict[str, np.ndarray]: ...


_READERS = {"classifier": classifier.Classifier.read, "ngram": ngram.NgramModel.read}


class Corpus(NamedTuple):
    """A corpus stage with examples."""

    path: Path
    format: Format


class Examples(NamedTuple):
    """Documents of one side."""

    texts: pl.Series
    halves: np.ndarray
    """Whether each is in the half that calibrates, bool."""


def examples(corpora: Sequence[Corpus], split: Split, max_bytes: int = MAX_BYTES) -> Examples:
    """The documents of a split, or of a larger one those of the lowest hashes up to `max_bytes` of text."""
    sizes, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for corpus in corpora:
        for batch in read_documents(corpus.path, split, ["bytes", "cluster"]):
            sizes.append(batch["bytes"].to_numpy())
            keys.append(mix(batch["cluster"].to_numpy().copy()))
    order = np.argsort(np.concatenate(keys), kind="stable")
    chosen = np.zeros(len(order), bool)
    fitting = int(np.searchsorted(np.cumsum(np.concatenate(sizes)[order]), max_bytes, side="right"))
    chosen[order[: max(1, fitting)]] = True
    texts, at = [pl.Series([], dtype=pl.String)], 0
    for corpus in corpora:
        for batch in read_documents(corpus.path, split, ["text"]):
            rows = chosen[at : at + batch.num_rows]
            texts.append(plain_texts(pl.Series(batch["text"]).filter(pl.Series(rows)), corpus.format))
            at += batch.num_rows
    return Examples(pl.concat(texts), np.concatenate(keys)[chosen] >> np.uint64(63) == 1)


def train(type: str, measure: Measure, good: Sequence[Corpus], bad: Sequence[Corpus]) -> tuple[Scorer, dict[str, Any]]:
    """Train a scorer and measure it.

    Args:
        type: `classifier` or `ngram`.
        measure: of an n-gram model.
        good: corpora of good documents.
        bad: corpora of bad ones; an n-gram model needs none, and is only measured with them.

    Returns:
        The scorer, and its result: counts, and with both sides `auc`, of a classifier also `log_loss` (nats) and
        `calibration_error` on held-out documents, of which no part was trained on or calibrated with.

    Raises:
        UserError: a side has too few documents.
    """
    sides = {"good": good} | ({"bad": bad} if bad else {})
    trained = {side: examples(corpora, "train") for side, corpora in sides.items()}
    held_out = {side: examples(corpora, "val") for side, corpora in sides.items()}
    for side in sides:
        _check_enough(side, trained[side], held_out[side])
    texts = pl.concat([held_out[side].texts for side in sides])
    halves = np.concatenate([held_out[side].halves for side in sides])
    is_good = np.repeat([side == "good" for side in sides], [len(held_out[side].texts) for side in sides])
    if type == "classifier":
        both = pl.concat([trained[side].texts for side in sides])
        labels = np.arange(len(both)) < len(trained["good"].texts)
        scorer: Scorer = classifier.train(both, labels, texts.filter(pl.Series(halves)), is_good[halves])
        texts, is_good = texts.filter(pl.Series(~halves)), is_good[~halves]
    else:
        scorer = ngram.train(trained["good"].texts, measure)
    scores = scorer.scores(texts)
    result: dict[str, Any] = {f"{side}_documents": len(trained[side].texts) for side in sides}
    result["held_out_documents"] = len(texts)
    result |= {f"{side}_mean": float(np.nanmean(scores[is_good == (side == "good")])) for side in sides}
    if bad:
        signed = scores if scorer.higher_is_better else -scores
        result["auc"] = auc(np.nan_to_num(signed, nan=-np.inf), is_good)
    if type == "classifier":
        result |= {"log_loss": log_loss(scores, is_good), "calibration_error": calibration_error(scores, is_good)}
    return scorer, result


def _check_enough(side: str, trained: Examples, held_out: Examples) -> None:
    if not len(trained.texts):
        raise UserError(f"{side}: found no training document, expected some; name corpora with text")
    calibrating = int(held_out.halves.sum())
    if len(held_out.texts) < LEAST_HELD_OUT or not 0 < calibrating < len(held_out.texts):
        raise UserError(
            f"{side}: found {len(held_out.texts)} held-out documents, expected {LEAST_HELD_OUT} or more to measure the "
            "scorer with; raise holdout.fraction of these corpora, or add documents"
        )


def save_scorer(path: Path, type: str, scorer: Scorer) -> None:
    """Write a scorer's file."""
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in scorer.tensors().items()}
    atomic_write(path, save(tensors, {"type": type, "measure": scorer.measure}))


def load_scorer(path: Path) -> Scorer:
    """Read a scorer's file. Raises UserError if it is damaged."""
    try:
        with safe_open(path, "np") as file:
            about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _READERS[about["type"]](tensors, about["measure"])
    except (SafetensorError, KeyError, TypeError):
        raise damaged(path, "scorer") from None
