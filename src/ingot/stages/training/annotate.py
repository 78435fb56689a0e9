"""Builder of the kind `annotate`: a teacher's predictions for every token, as columns of the token store.

A teacher is the same in every epoch and for every student. So its k largest logits and the exact logarithm of the tail
at each temperature (`train/divergences.py`) are written once, as an overlay of each split of each corpus. Train stages
with the objective `distill` read them by name. A killed stage resumes after its last checkpoint.

Shapes: B rows, T positions, N labelled positions, n positions of a chunk, D features, V vocabulary, k stored tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source
from ingot.data.packing import BestFit, Concatenated, RowPlan
from ingot.distributed.mesh import Mesh
from ingot.model.lm_head import chunk_size
from ingot.model.transformer import Transformer
from ingot.objectives.distill import IDS, LOGITS, stored_columns, tail_name
from ingot.stages.job import Input, Job
from ingot.stages.models.load import evaluation_context, load_model
from ingot.stages.training.annotate_settings import AnnotateSettings
from ingot.stages.training.reference_columns import add_columns
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.divergences import most_likely
from ingot.train.execution import resolve_device

SPLITS = ("train", "val")  # those of `store/encode.py`, which loads pyarrow: 100 MB of every process that trains
_READ_TOKENS = 1 << 20
"""Tokens whose tails are read at once for the mean."""


def directory(stage: Path, corpus: str, split: str) -> Path:
    """The overlay of a corpus's split in an annotate stage's directory."""
    return stage / "columns" / f"{corpus}-{split}"


def run(job: Job) -> dict[str, Any]:
    """Write the columns of all corpora."""
    settings = job.settings
    assert isinstance(settings, AnnotateSettings)
    loaded = load_model(job.inputs["teacher"].path, job.display.notify, settings.device, exact=True)
    context = evaluation_context(settings.context, loaded.config)
    vocab = loaded.tokenizer.vocab
    if loaded.config.vocab > vocab:
        job.display.notify(f"{loaded.config.vocab - vocab:,} ids of the teacher's head that no token has are left out")
    k = min(settings.k, vocab - 1)
    if k < settings.k:
        job.display.notify(f"k: {k} of {vocab} ids determine all probabilities, so no more are stored")
    columns = stored_columns(k, settings.temperatures, vocab)
    annotate = Annotator(loaded.model, resolve_device(settings.device), vocab, k, settings.temperatures)
    sources = list(_sources(job, settings, context, loaded.tokenizer))
    with job.display.bar(f"predictions of {job.inputs['teacher'].name}", _rows(sources), "rows") as bar:
        for path, source in sources:
            add_columns(columns, annotate, Mesh(), source, path, bar.advance)
    return {
        "tokens": sum(source.store.tokens for _, source in sources),
        "bytes_per_token": sum(np.dtype(c.dtype).itemsize * c.width for c in columns),
        "k": k,
        **{f"tail/{t:g}": _mean_tail(sources, tail_name(t)) for t in settings.temperatures},
    }


@dataclass(frozen=True)
class Annotator:
    """Computes the columns of a batch."""

    teacher: Transformer
    device: str
    vocab: int
    """Ids of the tokenizer; further ones are padding of the head."""
    k: int
    temperatures: tuple[float, ...]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        """The values of each column, B x T (x k), 0 at positions without a label."""
        labelled_BT = torch.as_tensor(batch.labels_BT != batch.ignore)
        out = self.teacher(**batch.to(self.device).inputs)
        hidden_ND = out.hidden[labelled_BT.to(self.device)]
        size = chunk_size(len(out.head.weight), hidden_ND.device, needs_grad=False)
        chunks = [
            [x.cpu() for x in most_likely(out.head(hidden_nD)[:, : self.vocab], self.k, self.temperatures)]
            for hidden_nD in hidden_ND.split(size)
        ]
        ids_Nk, logits_Nk, tails_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        tails = {tail_name(t): tails_N[:, i] for i, t in enumerate(self.temperatures)}
        values = {IDS: ids_Nk.squeeze(1), LOGITS: logits_Nk.squeeze(1), **tails}  # a width of 1 has no dimension
        return {name: _everywhere(x_N, labelled_BT) for name, x_N in values.items()}


def _everywhere(x_N: Tensor, labelled_BT: Tensor) -> Tensor:
    values = x_N.new_zeros(*labelled_BT.shape, *x_N.shape[1:])
    values[labelled_BT] = x_N
    return values


def _sources(job: Job, settings: AnnotateSettings, context: int, tokenizer: Tokenizer) -> Iterator[tuple[Path, Source]]:
    """(directory of its columns, rows) of each split that has any; the rows cover every target."""
    for name, tokens in job.roles("data").items():
        for split in SPLITS:
            store = Store.open(tokens.path / split, tokenizer=tokenizer.fingerprint)
            ends = np.asarray(store.ends)
            mask = store.columns["mask"].read if "mask" in store.columns else None
            concatenated = settings.packing.resolved_kind(store.content) == "concat"
            plan: RowPlan = Concatenated(ends, context, tail=True) if concatenated else BestFit(ends, context, mask)
            isolate = settings.packing.isolates(store.content)
            if store.documents and not plan.rows:
                raise UserError(
                    f"data.{name}: found no document that fits rows of {context:,} tokens in split {split}, expected "
                    "some; raise context"
                )
            if plan.rows:
                yield directory(job.out.path, name, split), Source(name, store, plan, isolate, tokenizer.pad)


def _rows(sources: list[tuple[Path, Source]]) -> int:
    return sum(source.plan.rows for _, source in sources)


def _mean_tail(sources: list[tuple[Path, Source]], name: str) -> float:
    """The mean probability that is not among the k stored ones, over all annotated tokens."""
    total, count = 0.0, 0
    for _, source in sources:
        for start in range(0, source.store.tokens, _READ_TOKENS):
            tail = source.store.columns[name].read(start, min(start + _READ_TOKENS, source.store.tokens))
            total, count = total + float(np.exp(tail[tail < 0], dtype=np.float64).sum()), count + int((tail < 0).sum())
    return total / max(1, count)


def add_stored(stage: Input, sources: Mapping[str, list[Source]]) -> None:
    """Add the columns of an annotate stage to the stores of a train stage.

    Args:
        stage: the annotate stage.
        sources: split -> sources, which it has all annotated (`stages/training/kind.py` checks it).
    """
    for split, of_split in sources.items():
        for source in of_split:
            if source.plan.rows:
                source.store.add_overlay(directory(stage.path, source.name, split))
