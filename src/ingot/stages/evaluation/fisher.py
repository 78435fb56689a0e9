"""Builder of the kind `fisher`: the diagonal Fisher information of a model, and its weights, for EWC penalties.

`fisher/` has the layout of a checkpoint: `fisher.NAME` and `theta.NAME` of every parameter in fp32 safetensors, a
manifest of digests, and the model's configuration. Partial sums are saved once a minute, so a killed stage resumes.
"""

import shutil
import time
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.core.artifact import checkpoint_problem
from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, make_batch
from ingot.data.packing import Concatenated, OnePerRow
from ingot.data.sampler import Order
from ingot.distributed import checkpoint
from ingot.evaluate.fisher import Fisher
from ingot.optim.grad_terms import mean_importance
from ingot.stages.evaluation.settings import FisherSettings
from ingot.stages.job import Job
from ingot.stages.models.importance import FISHER, read_fisher
from ingot.stages.models.load import LoadedModel, evaluation_context, load_model
from ingot.store.reader import Store
from ingot.train.execution import resolve_device

_PARTIAL, _SAVE_SECONDS = "partial", 60.0


def run(job: Job) -> dict[str, Any]:
    """Accumulate the squared gradients of `samples` rows of the old task."""
    settings = job.settings
    assert isinstance(settings, FisherSettings)
    loaded = load_model(job.inputs["model"].path, job.display.notify, settings.device, exact=True)
    fisher = Fisher(loaded.model, settings.labels, job.seed)
    previous = read_fisher(job.inputs["previous"].path, loaded.model) if "previous" in job.inputs else None
    _accumulate(job, settings, loaded, fisher)
    mean = fisher.mean()
    trace = fisher.trace()
    if previous:
        mean = {name: settings.gamma * previous[0][name].to(f.device) + f for name, f in mean.items()}
    theta = {f"theta.{name}": p.detach() for name, p in fisher.weights.items()}
    tensors = {f"fisher.{name}": f for name, f in mean.items()} | theta
    config = {"model": loaded.config.model_dump(), "tokenizer": loaded.tokenizer.fingerprint}
    checkpoint.save(job.out / FISHER, tensors, {"tokens": fisher.tokens}, config)
    shutil.rmtree(job.out / _PARTIAL, ignore_errors=True)
    elements = sum(f.numel() for f in mean.values())
    return {
        "mean": mean_importance(mean),
        "max": max(float(f.max()) for f in mean.values()),
        "zero_fraction": sum(int((f == 0).sum()) for f in mean.values()) / elements,
        "trace": trace["value"],
        "trace_low": trace["low"],
        "trace_high": trace["high"],
        "samples": settings.samples,
        "tokens": fisher.tokens,
        "parameters": elements,
    }


def _accumulate(job: Job, settings: FisherSettings, loaded: LoadedModel, fisher: Fisher) -> None:
    """Add the gradients of all rows, in the order in which a training run would draw them."""
    sources = _sources(job, loaded, evaluation_context(settings.context, loaded.config))
    weights = [settings.data[source.name] / source.plan.row_targets for source in sources]  # per row, not per token
    order = Order(tuple(source.plan.rows for source in sources), tuple(weights), job.seed)
    for source, drawn in zip(sources, order.drawn_after(settings.samples), strict=True):
        if drawn > source.plan.rows:
            job.display.notify(
                f"{source.name}: {drawn:,} samples are drawn from {source.plan.rows:,} rows, so rows repeat; lower "
                "samples, or add documents"
            )
    done = _resume(job, fisher)
    device, saved = resolve_device(settings.device), time.monotonic()
    with job.display.bar(f"fisher of {job.inputs['model'].name}", settings.samples, "rows", done=done) as bar:
        while done < settings.samples:
            rows = min(settings.pool, settings.samples - done)
            fisher.add(_trimmed(make_batch(sources, *order.at(done, rows))).to(device), first_row=done)
            done += rows
            bar.advance(rows)
            if time.monotonic() - saved > _SAVE_SECONDS:
                checkpoint.save(job.out / _PARTIAL, fisher.squares, {"done": done, **fisher.per_batch}, {})
                saved = time.monotonic()


def _resume(job: Job, fisher: Fisher) -> int:
    """Load the partial sums of an earlier process; returns the number of its rows."""
    path = job.out / _PARTIAL
    if not path.exists() or checkpoint_problem(path):
        return 0
    state = checkpoint.load(path, fisher.squares)
    fisher.per_batch = {name: state[name] for name in fisher.per_batch}
    job.display.notify(f"resuming from row {state['done']:,}")
    return int(state["done"])


def _sources(job: Job, loaded: LoadedModel, context: int) -> list[Source]:
    """Rows of the training splits: windows of text, or single conversations, whose gradients are squared one by one."""
    sources = []
    for name, tokens in job.roles("data").items():
        store = Store.open(tokens.path / "train", tokenizer=loaded.tokenizer.fingerprint)
        ends, masked = np.asarray(store.ends), "mask" in store.columns
        plan = OnePerRow(ends, context) if masked else Concatenated(ends, context, tail=True)
        if plan.rows == 0:
            raise UserError(f"data.{name}: found no usable text, expected some; add documents, or name another corpus")
        sources.append(Source(name, store, plan, isolate=False, pad_id=loaded.tokenizer.pad))
    return sources


def _trimmed(batch: Batch) -> Batch:
    """The batch without the positions after the last label of any row, on which no gradient depends."""
    labelled_T = np.flatnonzero((batch.labels_BT != batch.ignore).any(0))
    end = int(labelled_T[-1]) + 1 if len(labelled_T) else 1
    cut = {name: getattr(batch, name)[:, :end] for name in ("ids_BT", "labels_BT", "positions_BT")}
    documents_BT = batch.documents_BT if batch.documents_BT is None else batch.documents_BT[:, :end]
    return replace(batch, **cut, documents_BT=documents_BT)
