"""Builder of the `evaluate` kind: models times held-out corpora, yardsticks, samples, abilities."""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_lines
from ingot.evaluate.abilities import Answered, Examinee, rows, sit
from ingot.evaluate.forgetting import Scores
from ingot.evaluate.likelihood import Likelihood, compressors, likelihood
from ingot.evaluate.tasks import Task, load_task
from ingot.infer.generate import generate
from ingot.infer.streaming import sampling_for
from ingot.stages.evaluation.forgetting import forgotten
from ingot.stages.evaluation.settings import EvaluateStageSettings
from ingot.stages.job import ANSWERS, TABLE, Input, Job, corpus_of, read_config
from ingot.stages.models.lineage import converses
from ingot.stages.models.load import Loaded, load_model, measured_context
from ingot.store.reader import Store
from ingot.train.settings import rows_per_pass


def run(job: Job) -> dict[str, Any]:
    """Judge every model on every corpus that was encoded with its tokenizer."""
    settings = job.settings
    assert isinstance(settings, EvaluateStageSettings)
    table: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    scores: dict[tuple[str, str], Scores] = {}
    measured: set[str] = set()  # stores and corpora whose yardsticks stand in the table
    for stage in job.roles("model").values():
        measured_context(settings.context, read_config(stage.path))  # before hours of work
    for name, stage in job.roles("model").items():
        loaded = load_model(stage.path, job.display.say, settings.device, exact=True)
        for data, store in _stores(job, stage, loaded):
            corpus = corpus_of(data)
            if "mask" not in store.columns:
                table += _yardsticks(job, stage, data, store, loaded, measured)
                measured |= {data, corpus}
            scored = _score(job, settings, name, corpus, store, loaded)
            table += [{"model": name, "task": corpus, **row} for row in scored.rows()]
            chance = -math.log(loaded.tokenizer.vocab)
            scores[name, corpus] = Scores(scored.nats, scored.tokens, "_nats", chance)
        examinee = Examinee(loaded.model, loaded.tokenizer, converses(stage.path, loaded.tokenizer))
        _samples(job, settings, name, examinee)
        for task, answered in _sat(job, settings, name, examinee):
            table += [{"model": name, "task": task.head.task, **row} for row in rows(task, answered)]
            answers += [{"model": name, "task": task.head.task, **asdict(one)} for one in answered]
            right = np.array([one.right for one in answered])
            scores[name, task.head.task] = Scores(right, np.ones(len(right)), "")
    if answers:
        atomic_lines(job.out / ANSWERS, answers)
    table += forgotten(job, settings, scores)
    atomic_lines(job.out / TABLE, table)
    return {f"{r['model']}/{r['task']}/{r['metric']}": r["value"] for r in table}


def _stores(job: Job, model: Input, loaded: Loaded) -> Iterator[tuple[str, Store]]:
    """The held-out texts that are encoded for a model, by the names of their stages."""
    for data, tokens in job.roles("data").items():
        if tokens.key_of("tokenizer") == model.key_of("tokenizer"):
            store = Store.open(tokens.path / "val", tokenizer=loaded.tokenizer.fingerprint)
            if store.documents:
                yield data, store


def _yardsticks(
    job: Job, model: Input, data: str, store: Store, loaded: Loaded, measured: Collection[str]
) -> list[dict[str, Any]]:
    """What a model has to beat on running text: a uniform guess over its vocabulary, and compressors; of what has been
    measured already, nothing.
    """
    corpus, several = corpus_of(data), len({m.name_of("tokenizer") for m in job.roles("model").values()}) > 1
    guess = f"uniform guess of {model.name_of('tokenizer')}" if several else "uniform guess"
    bits = {}
    if data not in measured:
        bits[guess] = math.log2(loaded.tokenizer.vocab) * store.tokens / store.bytes
    if corpus not in measured:
        bits |= compressors(store, loaded.tokenizer)
    same = {"task": corpus, "metric": "bits_per_byte", "n": 1}
    return [{"model": name, "value": b, "low": b, "high": b, **same} for name, b in bits.items()]


def _score(
    job: Job, settings: EvaluateStageSettings, model: str, corpus: str, store: Store, loaded: Loaded
) -> Likelihood:
    context = measured_context(settings.context, loaded.config)
    with job.display.bar(f"evaluate {model} on {corpus}", unit="rows") as bar:
        return likelihood(loaded.model, store, settings.overlap, rows_per_pass(context), bar.advance, context)


def _sat(
    job: Job, settings: EvaluateStageSettings, model: str, examinee: Examinee
) -> Iterator[tuple[Task, list[Answered]]]:
    """Every task with what the model made of it."""
    for name in settings.tasks:
        task = load_task(name)
        with job.display.bar(f"{model}: {task.head.task}", len(task.items), "items") as bar:
            yield task, sit(examinee, task, settings.shots, bar.advance)


def _samples(job: Job, settings: EvaluateStageSettings, model: str, examinee: Examinee) -> None:
    tokenizer, chats = examinee.tokenizer, examinee.chats
    sampling = sampling_for(tokenizer, max_new=settings.sample_tokens, temperature=settings.temperature)
    for number, text in enumerate(settings.questions if chats else settings.prompts):
        prompt = examinee.prompt(text, chats)
        (completion,) = generate(examinee.model, [prompt], sampling, seed=job.seed, step=number)
        job.log.write("sample", step=number, model=model, prompt=text, text=tokenizer.decode(completion.ids))
