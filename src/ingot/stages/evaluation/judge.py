"""Builder of the kind `judge`: models answer the same held-out prompts, and judges compare the answers.

The random numbers of an answer are keyed by (seed, prompt), so a model's answers depend neither on the other models nor
on batching. `answers.jsonl` has the answers with the scores of every judge. `table.jsonl` has the metrics: one task for
each judge, and the task `answers` for metrics that need no judge.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_lines
from ingot.core.errors import UserError
from ingot.core.functions import is_function, load_function
from ingot.core.statistics import wilson
from ingot.evaluate import winrate
from ingot.evaluate.abilities import Subject
from ingot.evaluate.bootstrap import ratio
from ingot.evaluate.continuations import score
from ingot.evaluate.monitors import distinct
from ingot.infer.generate import Completion, generate
from ingot.infer.streaming import completion_text, sampling_for
from ingot.objectives.reward_functions import call_reward_function, prompt_table
from ingot.objectives.settings import scores_rows
from ingot.stages.evaluation.settings import JudgeSettings
from ingot.stages.job import ANSWERS, TABLE, Input, Job, read_config
from ingot.stages.models.lineage import is_chat_model
from ingot.stages.models.load import LoadedModel, load_model
from ingot.stages.models.reward_scores import RewardStage
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.settings import rows_per_pass

COMPARISON_PROMPT = "{prompt}\n\nAnswer A: {a}\n\nAnswer B: {b}\n\n{question} Answer"
"""Prompt of a language model as a judge; it answers " A" or " B"."""


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt."""

    ids: np.ndarray
    table: dict[str, Any]
    """`prompt`, its text without special tokens, and the other fields of its row, as for a reward function."""


@dataclass(frozen=True)
class Answers:
    """One model's answers, in the order of the prompts."""

    completions: list[Completion]
    texts: list[str]
    logps: np.ndarray | None
    """ln p of each answer under the model `against`, [N] float64; NaN where prompt and answer exceed its context. None
    where it was not measured."""

    @property
    def tokens(self) -> np.ndarray:
        return np.array([len(c.ids) for c in self.completions], float)


def run(job: Job) -> dict[str, Any]:
    """Sample the answers of all models and judge them."""
    settings = job.settings
    assert isinstance(settings, JudgeSettings)
    models = {settings.against: job.inputs["against"], **job.roles("model")}
    base = load_model(models[settings.against].path, job.display.notify, settings.device, exact=True)
    context = min(read_config(stage.path).context for stage in models.values())
    prompts = open_prompts(job.inputs["data"], base.tokenizer, context, settings, job.display.notify)
    answers = {name: _answer(job, settings, name, stage, base, prompts) for name, stage in models.items()}
    table = [row for name, written in answers.items() for row in _answer_metrics(name, written, settings)]
    scores: dict[str, dict[str, np.ndarray]] = {}
    for judge in settings.by:
        rows, scores[judge] = _judge(job, settings, judge, prompts, answers)
        table += rows
    lines = [
        {
            "model": name,
            "prompt": prompt.table["prompt"],
            "answer": written.texts[n],
            "tokens": len(written.completions[n].ids),
            "ended_by": written.completions[n].stop_reason,
            "scores": {judge: _number(by_model[name][n]) for judge, by_model in scores.items() if name in by_model},
        }
        for name, written in answers.items()
        for n, prompt in enumerate(prompts)
    ]
    for name in answers:
        job.log.write("sample", step=0, model=name, prompt=prompts[0].table["prompt"], text=answers[name].texts[0])
    atomic_lines(job.out / ANSWERS, lines)
    atomic_lines(job.out / TABLE, table)
    return {f"{r['model']}/{r['task']}/{r['metric']}": r["value"] for r in table}


def open_prompts(
    data: Input, tokenizer: Tokenizer, context: int, settings: JudgeSettings, notify: Callable[[str], None]
) -> list[Prompt]:
    """The prompts of the held-out documents: the tokens before the first target. A pair gives one prompt.

    Args:
        data: the tokens stage.
        tokenizer: its tokenizer.
        context: the shortest context of all models.
        settings: the stage; at most `prompts`, evenly spaced.
        notify: receives how many prompts fill the context.

    Raises:
        UserError: every prompt is longer than the context.
    """
    store = Store.open(data.path / "val", tokenizer=tokenizer.fingerprint)
    prompts = []
    for document in range(0, store.documents, store.group):
        start, end = store.span(document)
        mask = store.columns["mask"].read(start, end) != 0
        ids = store.ids.read(start, start + int(mask.argmax()) if mask.any() else end).astype(np.int64)
        if len(ids) < context:
            prompts.append(Prompt(ids, prompt_table(ids, store.identity(document).get("extra"), tokenizer)))
    if not prompts:
        raise UserError(
            f"data: found no held-out prompt in '{settings.data}' that is shorter than the context of {context:,} "
            "tokens; raise its holdout.fraction, or name another corpus"
        )
    held_out = store.documents // store.group
    if too_long := held_out - len(prompts):
        notify(
            f"{settings.data}: {too_long:,} of {held_out:,} held-out prompts are left out, because they fill the "
            f"context of {context:,} tokens"
        )
    size = min(settings.prompts, len(prompts))
    return [prompts[n * len(prompts) // size] for n in range(size)]


def _answer(
    job: Job, settings: JudgeSettings, name: str, stage: Input, base: LoadedModel, prompts: Sequence[Prompt]
) -> Answers:
    is_base = name == settings.against
    loaded = base if is_base else load_model(stage.path, job.display.notify, settings.device, exact=True)
    sampling = sampling_for(base.tokenizer, max_new=settings.max_new, temperature=settings.temperature)
    size, completions = rows_per_pass(min(loaded.config.context, base.config.context)), list[Completion]()
    with job.display.bar(f"{name} answers", len(prompts), "prompts") as bar:
        for start in range(0, len(prompts), size):
            ids = [prompt.ids for prompt in prompts[start : start + size]]
            keys = [(start + n, 0) for n in range(len(ids))]
            completions += generate(loaded.model, ids, sampling, seed=job.seed, keys=keys)
            bar.advance(len(ids))
    logps = None
    if settings.temperature == 1 and not is_base:
        requests = [(p.ids, c.ids) for p, c in zip(prompts, completions, strict=True)]
        fits = np.array([len(prompt) + len(ids) <= base.config.context + 1 for prompt, ids in requests])
        logps = np.full(len(fits), np.nan)
        logps[fits] = [scored.logp for scored in score(base.model, [requests[n] for n in np.flatnonzero(fits)])]
    return Answers(completions, [completion_text(base.tokenizer, c) for c in completions], logps)


def _answer_metrics(name: str, answers: Answers, settings: JudgeSettings) -> Iterator[dict[str, Any]]:
    """Table rows that need no judge: length, stops, repetition; at temperature 1 also entropy and KL divergence."""
    tokens, n = answers.tokens, len(answers.texts)
    metrics: dict[str, dict[str, Any]] = {
        "tokens": ratio(tokens, np.ones(n)),
        "stopped": wilson(sum(c.stop_reason == "stop" for c in answers.completions), n),
    }
    distinct_bigrams = np.array([distinct([c.ids.tolist()]) for c in answers.completions])
    metrics["distinct_2"] = ratio(distinct_bigrams, np.ones(n))
    if settings.temperature == 1:
        logps = np.array([float(c.logps.sum(dtype=np.float64)) for c in answers.completions])
        metrics["entropy_nats"] = ratio(-logps, tokens)
        if answers.logps is not None and (known := ~np.isnan(answers.logps)).any():
            metrics["kl_nats"] = ratio((logps - answers.logps)[known], np.ones(known.sum()))
    yield from ({"model": name, "task": "answers", "metric": metric, **row} for metric, row in metrics.items())


def _judge(
    job: Job,
    settings: JudgeSettings,
    judge: str,
    prompts: Sequence[Prompt],
    answers: dict[str, Answers],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Table rows of one judge, and its scores by model.

    A reward model or a function scores the answers of all models. A language model compares answers with those of
    `against`; the score is then the probability that the answer is better, averaged over both orders.
    """
    base, table = answers[settings.against], []
    others = {name: written for name, written in answers.items() if name != settings.against}

    def add(model: str, rows: Iterator[dict[str, Any]]) -> None:
        table.extend({"model": model, "task": judge, **row} for row in rows)

    stage = job.inputs.get(f"judge:{judge}")
    if stage is not None and not scores_rows(stage.settings()):
        compare = _Comparison(job, settings, judge, stage, prompts)
        scores = {}
        for name, written in others.items():
            first, second = compare(written.texts, base.texts), 1 - compare(base.texts, written.texts)
            scores[name] = (first + second) / 2
            add(name, winrate.rows(winrate.by_both_orders(first, second), written.tokens, base.tokens))
            add(name, winrate.order_rows(first, second))
        return table, scores
    scorer = _function_scorer(judge) if stage is None else _reward_scorer(job, settings, stage)
    scores = {name: scorer(prompts, written) for name, written in answers.items()}
    add(settings.against, winrate.score_rows(scores[settings.against], None))
    for name, written in others.items():
        verdicts = winrate.by_scores(scores[name], scores[settings.against], settings.tie)
        if np.isnan(verdicts).all():
            raise UserError(
                f"by: '{judge}' scored no prompt for both {name} and {settings.against}, expected some; fix the "
                "function, or use a reward model with a longer context"
            )
        add(name, winrate.rows(verdicts, written.tokens, base.tokens))
        add(name, winrate.score_rows(scores[name], scores[settings.against]))
    return table, scores


Scorer = Callable[[Sequence[Prompt], Answers], np.ndarray]
"""(prompts, answers) -> scores, [N] float64; NaN for an answer without a score."""


def _function_scorer(name: str) -> Scorer:
    assert is_function(name), name
    function = load_function(name, "by")
    return lambda prompts, answers: np.array(
        call_reward_function(name, function, [p.table for p in prompts], answers.texts, "by")
    )


def _reward_scorer(job: Job, settings: JudgeSettings, stage: Input) -> Scorer:
    rewards = RewardStage(stage, job, settings.device)

    def score_answers(prompts: Sequence[Prompt], answers: Answers) -> np.ndarray:
        return rewards([np.concatenate([p.ids, c.ids]) for p, c in zip(prompts, answers.completions, strict=True)])

    return score_answers


class _Comparison:
    """A language model as a judge: the probability that the first of two answers is better, [N]."""

    def __init__(self, job: Job, settings: JudgeSettings, name: str, stage: Input, prompts: Sequence[Prompt]):
        loaded = load_model(stage.path, job.display.notify, settings.device, exact=True)
        self._subject = Subject(loaded.model, loaded.tokenizer, is_chat_model(stage.path, loaded.tokenizer))
        self._prompts, self._question, self._bar = prompts, settings.question, job.display.bar
        self._name = name

    def __call__(self, first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        questions = [
            COMPARISON_PROMPT.format(prompt=prompt.table["prompt"], a=a, b=b, question=self._question)
            for prompt, a, b in zip(self._prompts, first, second, strict=True)
        ]
        pairs = [(question, choice) for question in questions for choice in (" A", " B")]
        with self._bar(f"{self._name} judges", len(pairs), "answers") as bar:
            nats_P2 = np.array(self._subject.nats(pairs, self._subject.chats, bar.advance)).reshape(-1, 2)
        return 1 / (1 + np.exp(nats_P2[:, 0] - nats_P2[:, 1]))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
