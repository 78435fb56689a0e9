"""Builder of the kind `evaluate`: loss on held-out corpora, baselines, samples and tasks of each model."""

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ingot.core.artifact import atomic_lines
from ingot.evaluate.abilities import ItemResult, Subject, rows, run_task
from ingot.evaluate.forgetting import Scores
from ingot.evaluate.likelihood import Likelihood, compressors, likelihood, row_count
from ingot.evaluate.tasks import Task, load_task
from ingot.infer.generate import generate
from ingot.infer.streaming import sampling_for
from ingot.stages.evaluation.exact_match import question_task, with_room
from ingot.stages.evaluation.forgetting import forgetting_rows
from ingot.stages.evaluation.kind import QUESTIONS
from ingot.stages.evaluation.settings import EvaluateStageSettings
from ingot.stages.evaluation.teacher import teacher_rows
from ingot.stages.job import ANSWERS, TABLE, Input, Job, corpus_of, read_config
from ingot.stages.models.lineage import is_chat_model
from ingot.stages.models.load import LoadedModel, evaluation_context, load_model
from ingot.store.reader import Store
from ingot.train.execution import AUTOCAST, fastest_precision, resolve_device
from ingot.train.settings import rows_per_pass


def run(job: Job) -> dict[str, Any]:
    """Evaluate every model on every corpus that was encoded with its tokenizer, and on every task."""
    settings = job.settings
    assert isinstance(settings, EvaluateStageSettings)
    with _arithmetic(settings):
        return _evaluate(job, settings)


def _arithmetic(settings: EvaluateStageSettings) -> contextlib.AbstractContextManager[Any]:
    """The autocast context of all forward passes."""
    device = resolve_device(settings.device)
    precision = fastest_precision(device)[0] if settings.precision == "auto" else settings.precision
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device, dtype) if dtype else contextlib.nullcontext()


def _evaluate(job: Job, settings: EvaluateStageSettings) -> dict[str, Any]:
    table: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    scores: dict[tuple[str, str], Scores] = {}
    with_baselines: set[str] = set()  # stores and corpora whose baselines are in the table
    for stage in job.roles("model").values():
        evaluation_context(settings.context, read_config(stage.path))  # errors before hours of work
    notify, corpora = job.display.notify, job.roles(QUESTIONS).values()
    questions = [question_task(corpus, settings.max_questions, notify) for corpus in corpora]
    tasks = [load_task(name) for name in settings.tasks]
    for name, stage in job.roles("model").items():
        loaded = load_model(stage.path, job.display.notify, settings.device, exact=True)
        for data, store in _stores(job, stage, loaded):
            corpus = corpus_of(data)
            if "mask" not in store.columns:
                table += _baselines(job, stage, data, store, loaded, with_baselines)
                with_baselines |= {data, corpus}
            result = _likelihood(job, settings, name, corpus, store, loaded)
            table += [{"model": name, "task": corpus, **row} for row in result.rows()]
            chance = -math.log(loaded.tokenizer.vocab)
            if result.tokens.any():
                scores[name, corpus] = Scores(result.nats, result.tokens, "_nats", chance)
        subject = Subject(loaded.model, loaded.tokenizer, is_chat_model(stage.path, loaded.tokenizer))
        _samples(job, settings, name, subject)
        of_model = [*(with_room(task, subject, notify) for task in questions), *tasks]
        for task, results in _task_results(job, settings, name, subject, of_model):
            table += [{"model": name, "task": task.head.task, **row} for row in rows(task, results)]
            answers += [{"model": name, "task": task.head.task, **asdict(result)} for result in results]
            right = np.array([result.right for result in results])
            scores.setdefault((name, task.head.task), Scores(right, np.ones(len(right)), ""))
    if answers:
        atomic_lines(job.out / ANSWERS, answers)
    table += forgetting_rows(job, settings, scores)
    table += teacher_rows(job, settings) if settings.teacher else []
    atomic_lines(job.out / TABLE, table)
    return {f"{r['model']}/{r['task']}/{r['metric']}": r["value"] for r in table}


def _stores(job: Job, model: Input, loaded: LoadedModel) -> Iterator[tuple[str, Store]]:
    """The held-out stores that were encoded with a model's tokenizer, with the names of their stages."""
    for data, tokens in job.roles("data").items():
        if tokens.key_of("tokenizer") == model.key_of("tokenizer"):
            store = Store.open(tokens.path / "val", tokenizer=loaded.tokenizer.fingerprint)
            if store.documents:
                yield data, store


def _baselines(
    job: Job, model: Input, data: str, store: Store, loaded: LoadedModel, done: Collection[str]
) -> list[dict[str, Any]]:
    """Table rows of baselines on text: a uniform guess over the vocabulary, and compressors.

    Args:
        job: the job.
        model: the evaluated model's stage.
        data: name of the tokens stage.
        store: its held-out split.
        loaded: the evaluated model.
        done: tokens stages and corpora whose baselines are in the table already.
    """
    corpus, several = corpus_of(data), len({m.name_of("tokenizer") for m in job.roles("model").values()}) > 1
    guess = f"uniform guess of {model.name_of('tokenizer')}" if several else "uniform guess"
    bits = {}
    if data not in done:
        bits[guess] = math.log2(loaded.tokenizer.vocab) * store.tokens / store.bytes
    if corpus not in done:
        bits |= compressors(store, loaded.tokenizer)
    common = {"task": corpus, "metric": "bits_per_byte", "n": 1}
    return [{"model": name, "value": b, "low": b, "high": b, **common} for name, b in bits.items()]


def _likelihood(
    job: Job, settings: EvaluateStageSettings, model: str, corpus: str, store: Store, loaded: LoadedModel
) -> Likelihood:
    context = evaluation_context(settings.context, loaded.config)
    rows = row_count(store, settings.overlap, context)
    with job.display.bar(f"evaluate {model} on {corpus}", rows, "rows") as bar:
        result = likelihood(loaded.model, store, settings.overlap, rows_per_pass(context), bar.advance, context)
    if result.dropped_tokens:
        message = f"{model} on {corpus}: {result.dropped_tokens:,} tokens beyond the context of {context} are left out"
        count = f"{result.dropped:,} of {store.documents:,} conversations that have no response left"
        job.display.notify(f"{message}, with {count}" if result.dropped else message)
    return result


def _task_results(
    job: Job, settings: EvaluateStageSettings, model: str, subject: Subject, tasks: Sequence[Task]
) -> Iterator[tuple[Task, list[ItemResult]]]:
    """Every task with the model's results."""
    for task in tasks:
        with job.display.bar(f"{model}: {task.head.task}", len(task.items), "items") as bar:
            yield task, run_task(subject, task, settings.shots, bar.advance, settings.sandbox)


def _samples(job: Job, settings: EvaluateStageSettings, model: str, subject: Subject) -> None:
    tokenizer, chats = subject.tokenizer, subject.chats
    sampling = sampling_for(tokenizer, max_new=settings.sample_tokens, temperature=settings.temperature)
    for number, text in enumerate(settings.questions if chats else settings.prompts):
        prompt = subject.prompt(text, chats)
        (completion,) = generate(subject.model, [prompt], sampling, seed=job.seed, step=number)
        sample = {"prompt": text, "text": tokenizer.decode(completion.ids), "answer": chats}
        job.log.write("sample", step=number, model=model, **sample)
