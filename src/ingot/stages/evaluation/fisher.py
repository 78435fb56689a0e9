"""Builder of the `fisher` kind: which weights the old task hangs on, kept with those weights as an anchor to return to.

`fisher/` is laid out like a checkpoint: `fisher.NAME` and `theta.NAME` of every parameter in fp32 safetensors, a
manifest of digests, the model's shape. Squares so far are kept once a minute, so a killed stage goes on from there.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.core.artifact import manifest_problem
from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, make_batch
from ingot.data.packing import Concatenated, OnePerRow
from ingot.data.sampler import Order
from ingot.distributed import checkpoint
from ingot.evaluate.fisher import Fisher
from ingot.model import lora
from ingot.model.config import ModelConfig
from ingot.model.transformer import empty
from ingot.optim.grad_terms import mean_of
from ingot.stages.evaluation.settings import FisherSettings
from ingot.stages.job import Job
from ingot.stages.models.load import Loaded, load_model, measured_context
from ingot.store.reader import Store
from ingot.train.execution import resolve_device

FISHER = "fisher"
_PARTIAL, _SAVE_SECONDS = "partial", 60.0


def run(job: Job) -> dict[str, Any]:
    """Square the gradients of so many rows of the old task."""
    settings = job.settings
    assert isinstance(settings, FisherSettings)
    loaded = load_model(job.inputs["model"].path, job.display.say, settings.device, exact=True)
    fisher = Fisher(loaded.model, settings.labels, job.seed)
    before = read_fisher(job.inputs["previous"].path, loaded.model) if "previous" in job.inputs else None
    _accumulate(job, settings, loaded, fisher)
    mean = fisher.mean()
    trace = fisher.trace()
    if before:
        mean = {name: settings.gamma * before[0][name].to(f.device) + f for name, f in mean.items()}
    theta = {f"theta.{name}": p.detach() for name, p in fisher.weights.items()}
    tensors = {f"fisher.{name}": f for name, f in mean.items()} | theta
    config = {"model": loaded.config.model_dump(), "tokenizer": loaded.tokenizer.fingerprint}
    checkpoint.save(job.out / FISHER, tensors, {"tokens": fisher.tokens}, config)
    shutil.rmtree(job.out / _PARTIAL, ignore_errors=True)
    elements = sum(f.numel() for f in mean.values())
    return {
        "mean": mean_of(mean),
        "max": max(float(f.max()) for f in mean.values()),
        "zero_share": sum(int((f == 0).sum()) for f in mean.values()) / elements,
        "trace": trace["value"],
        "trace_low": trace["low"],
        "trace_high": trace["high"],
        "samples": settings.samples,
        "tokens": fisher.tokens,
        "parameters": elements,
    }


def read_fisher(stage: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """F and theta* of a fisher stage, by the parameters of a model of that shape, on the CPU.

    Raises:
        UserError: damaged, or measured on a model of another shape.
    """
    if trouble := manifest_problem(stage / FISHER):
        raise UserError(f"damaged: {trouble}; delete {stage.resolve()} and run the recipe again")
    shapes = {name: weight.shape for name, weight in lora.weights(model).items()}
    told = json.loads((stage / FISHER / checkpoint.CONFIG).read_text())
    measured = empty(ModelConfig.model_validate(told["model"]), "meta", torch.float32)
    if shapes != {name: p.shape for name, p in measured.named_parameters()}:
        raise UserError(
            f"{stage}: its Fisher information is of a model of another shape, expected the one that is trained; "
            "measure it on the stage in init"
        )
    found = {f"{kind}.{name}": torch.empty(shape) for kind in ("fisher", "theta") for name, shape in shapes.items()}
    checkpoint.load(stage / FISHER, found)
    return tuple({name: found[f"{kind}.{name}"] for name in shapes} for kind in ("fisher", "theta"))  # type: ignore[return-value]


def _accumulate(job: Job, settings: FisherSettings, loaded: Loaded, fisher: Fisher) -> None:
    """All rows in the order of a training run, a mixture by tokens, one pass each."""
    sources = _sources(job, loaded, measured_context(settings.context, loaded.config))
    shares = [settings.data[source.name] / source.plan.row_targets for source in sources]
    order = Order(tuple(source.plan.rows for source in sources), tuple(shares), job.seed)
    done = _resume(job, fisher)
    device, saved = resolve_device(settings.device), time.monotonic()
    with job.display.bar(f"fisher of {job.inputs['model'].name}", settings.samples, "rows", done=done) as bar:
        while done < settings.samples:
            rows = min(settings.pool, settings.samples - done)
            fisher.add(_trimmed(make_batch(sources, *order.at(done, rows))).to(device), place=done)
            done += rows
            bar.advance(rows)
            if time.monotonic() - saved > _SAVE_SECONDS:
                checkpoint.save(job.out / _PARTIAL, fisher.squares, {"done": done, **fisher.noted}, {})
                saved = time.monotonic()


def _resume(job: Job, fisher: Fisher) -> int:
    """Rows that an earlier process has squared."""
    path = job.out / _PARTIAL
    if not path.exists() or manifest_problem(path):
        return 0
    state = checkpoint.load(path, fisher.squares)
    fisher.noted = {name: state[name] for name in fisher.noted}
    job.display.say(f"going on from row {state['done']:,}")
    return int(state["done"])


def _sources(job: Job, loaded: Loaded, context: int) -> list[Source]:
    """Windows of text, as in training; each conversation in a row of its own, so that its square is its own."""
    sources = []
    for name, tokens in job.roles("data").items():
        store = Store.open(tokens.path / "train", tokenizer=loaded.tokenizer.fingerprint)
        ends, masked = np.asarray(store.ends), "mask" in store.columns
        plan = OnePerRow(ends, context) if masked else Concatenated(ends, context, tail=True)
        if plan.rows == 0:
            raise UserError(f"data.{name}: found no text to measure on; give it more, or name another corpus")
        sources.append(Source(name, store, plan, isolate=False, pad_id=loaded.tokenizer.pad))
    return sources


def _trimmed(batch: Batch) -> Batch:
    """Without the places after the last label, which nothing depends on."""
    labelled_T = np.flatnonzero((batch.labels_BT != batch.ignore).any(0))
    end = int(labelled_T[-1]) + 1 if len(labelled_T) else 1
    cut = {name: getattr(batch, name)[:, :end] for name in ("ids_BT", "labels_BT", "positions_BT")}
    documents_BT = batch.documents_BT if batch.documents_BT is None else batch.documents_BT[:, :end]
    return replace(batch, **cut, documents_BT=documents_BT)
