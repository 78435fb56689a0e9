"""Students beside their teacher: how often and how closely they predict the same, and what they predict.

The probabilities that a teacher gives to tokens other than the label are what a student can learn from it and not from
the text (the "dark knowledge" of Hinton et al. 2015, section 3). So the report shows them for sampled positions, and
beside them the student's before its first step and after its last.

Shapes: T positions, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.evaluate.likelihood import comparison, held_out_rows, row_count
from ingot.model.transformer import Transformer, build, take_layers
from ingot.stages.evaluation.settings import EvaluateStageSettings
from ingot.stages.job import Input, Job, corpus_of, inputs_of, read_config, read_record
from ingot.stages.models.load import LoadedModel, evaluation_context, load_model
from ingot.stages.training.initial_layers import initial_layers
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.execution import resolve_device
from ingot.train.settings import rows_per_pass

MAX_ROWS = 256
"""Most rows on which two models are compared: both read them, and few rows give a mean over many tokens."""
POSITIONS, TOKENS = 6, 5
"""Sampled positions of a corpus, and most likely tokens of each model that are logged."""
_BEFORE = 48
"""Tokens before a position that are logged."""


@dataclass(frozen=True)
class Position:
    """A labelled position of held-out text."""

    batch: Batch
    """Its row."""
    t: int

    @property
    def before(self) -> np.ndarray:
        return self.batch.ids_BT[0, max(0, self.t + 1 - _BEFORE) : self.t + 1]

    @property
    def label(self) -> int:
        return int(self.batch.labels_BT[0, self.t])


def teacher_rows(job: Job, settings: EvaluateStageSettings) -> list[dict[str, Any]]:
    """Table rows {model, task, metric, value, low, high, n} of every student and corpus. Sampled positions are logged.

    `agreement_with_teacher` is the fraction of tokens with the same most likely token, `kl_from_teacher_nats` is
    KL(teacher, student), both on the same rows.
    """
    models = job.roles("model")
    assert settings.teacher
    teacher, rows = _load(job, models[settings.teacher], settings), []
    for data, tokens in job.roles("data").items():
        if tokens.key_of("tokenizer") != models[settings.teacher].key_of("tokenizer"):
            continue
        store = Store.open(tokens.path / "val", tokenizer=teacher.tokenizer.fingerprint)
        if not store.documents:
            continue
        shortest = min(evaluation_context(settings.context, read_config(m.path)) for m in models.values())
        positions = list(_positions(store, settings.overlap, shortest))
        for name, stage in models.items():
            loaded = teacher if name == settings.teacher else _load(job, stage, settings)
            start = None if loaded is teacher else _untrained(job, stage, loaded, settings)
            before = {f"{name} before training": start} if start else {}
            for model, shown in {**before, name: loaded}.items():
                for number, position in enumerate(positions):
                    where = {"task": corpus_of(data), "number": number, "model": model}
                    job.log.write("prediction", **where, **_prediction(shown, position))
            if name != settings.teacher:
                rows += _compare(job, settings, teacher, loaded, name, corpus_of(data), store)
    return rows


def _load(job: Job, stage: Input, settings: EvaluateStageSettings) -> LoadedModel:
    return load_model(stage.path, job.display.notify, settings.device, exact=True)


def _untrained(job: Job, stage: Input, loaded: LoadedModel, settings: EvaluateStageSettings) -> LoadedModel | None:
    """The model of a distilled student before its first step: the weights of its seed, or of its `init`.

    None for other models, and where `init` has been deleted.
    """
    record = read_record(stage.path)
    if "teacher" not in (record["settings"].get("objective") or {}):
        return None
    init, device = inputs_of(stage.path).get("init"), resolve_device(settings.device)
    if init is None:
        return replace(loaded, model=build(loaded.config, record["seed"], device).eval())
    if not init.path.exists():
        job.display.notify(f"{stage.name}: '{init.name}', from which it started, was deleted and is not shown")
        return None
    model = load_model(init.path, job.display.notify, device, exact=True, context=loaded.config.context).model
    if layers := record["settings"].get("init_layers"):
        take_layers(model, initial_layers(layers, model.config.depth))
    return replace(loaded, model=model.eval())


def _compare(
    job: Job,
    settings: EvaluateStageSettings,
    teacher: LoadedModel,
    student: LoadedModel,
    name: str,
    corpus: str,
    store: Store,
) -> Iterator[dict[str, Any]]:
    context = min(evaluation_context(settings.context, m.config) for m in (teacher, student))
    rows = min(MAX_ROWS, row_count(store, settings.overlap, context))
    models, size = (teacher.model, student.model), rows_per_pass(context)
    with job.display.bar(f"{name} beside {settings.teacher} on {corpus}", rows, "rows") as bar:
        kl, agreement = comparison(*models, store, settings.overlap, size, bar.advance, context, rows)
    for metric, value in (("agreement_with_teacher", agreement), ("kl_from_teacher_nats", kl)):
        yield {"model": name, "task": corpus, "metric": metric, **value}


def _positions(store: Store, overlap: float, context: int) -> Iterator[Position]:
    """Evenly spaced rows, and in each the last labelled position, which has the most text before it."""
    for batch in held_out_rows(store, overlap, context, POSITIONS):
        labelled = np.flatnonzero(batch.labels_BT[0] != IGNORE)
        if len(labelled):
            yield Position(batch, int(labelled[-1]))


@torch.inference_mode()
def _prediction(loaded: LoadedModel, position: Position) -> dict[str, Any]:
    """The most likely tokens of a model at a position, and the probability that it gives to the label."""
    model: Transformer = loaded.model
    tokenizer: Tokenizer = loaded.tokenizer
    device = str(next(model.parameters()).device)
    logits_TV = model(**position.batch.to(device).inputs).logits[0, :, : tokenizer.vocab]
    p_V = logits_TV[position.t].float().softmax(-1).cpu()
    top = p_V.topk(min(TOKENS, len(p_V)))
    likely = zip(map(tokenizer.decode, top.indices[:, None].numpy()), top.values.tolist(), strict=True)
    return {
        "before": tokenizer.decode(position.before),
        "label": tokenizer.decode([position.label]),
        "p_label": round(float(p_V[position.label]), 4),
        "likely": [[text, round(p, 4)] for text, p in likely],
    }
