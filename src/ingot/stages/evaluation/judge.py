"""Builder of the `judge` kind: models answer the same held-out prompts, judges say which answers are better.

Randomness is keyed by (seed, prompt), so a model's answers do not depend on who else is judged or on batches. What
every model wrote and every judge said is in `answers.jsonl`; numbers are in `table.jsonl`, a task for each judge and
one (`answers`) for what needs no judge.
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
from ingot.evaluate.abilities import Examinee
from ingot.evaluate.bootstrap import ratio
from ingot.evaluate.continuations import score
from ingot.evaluate.monitors import distinct
from ingot.infer.generate import Completion, generate
from ingot.infer.streaming import completion_text, sampling_for
from ingot.objectives.reward_functions import ask, prompt_table
from ingot.objectives.settings import scores_rows
from ingot.stages.evaluation.settings import JudgeSettings
from ingot.stages.job import ANSWERS, TABLE, Input, Job, read_config
from ingot.stages.models.lineage import converses
from ingot.stages.models.load import Loaded, load_model
from ingot.stages.models.reward_scores import RewardStage
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.settings import rows_per_pass

ASKED = "{prompt}\n\nAnswer A: {a}\n\nAnswer B: {b}\n\n{question} Answer"
"""What a model that judges is asked; it goes on with " A" or " B"."""


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt."""

    ids: np.ndarray
    table: dict[str, Any]
    """Its text without special tokens under `prompt`, and the further fields of its row."""


@dataclass(frozen=True)
class Answers:
    """What one model wrote, in the order of the prompts."""

    completions: list[Completion]
    texts: list[str]
    logps: np.ndarray | None
    """ln p of each answer under the model that others are compared with, NaN where that has a shorter context than
    prompt and answer; None where it was not measured."""

    @property
    def tokens(self) -> np.ndarray:
        return np.array([len(c.ids) for c in self.completions], float)


def run(job: Job) -> dict[str, Any]:
    """Let all models answer, and judge them."""
    settings = job.settings
    assert isinstance(settings, JudgeSettings)
    models = {settings.against: job.inputs["against"], **job.roles("model")}
    base = load_model(models[settings.against].path, job.display.say, settings.device, exact=True)
    context = min(read_config(stage.path).context for stage in models.values())
    prompts = open_prompts(job.inputs["data"], base.tokenizer, context, settings)
    answers = {name: _answer(job, settings, name, stage, base, prompts) for name, stage in models.items()}
    table = [row for name, found in answers.items() for row in _described(name, found, settings)]
    scores: dict[str, dict[str, np.ndarray]] = {}
    for judge in settings.by:
        rows, scores[judge] = _judged(job, settings, judge, prompts, answers)
        table += rows
    lines = [
        {
            "model": name,
            "prompt": prompt.table["prompt"],
            "answer": found.texts[n],
            "tokens": len(found.completions[n].ids),
            "ended_by": found.completions[n].stop_reason,
            "scores": {judge: _number(said[name][n]) for judge, said in scores.items() if name in said},
        }
        for name, found in answers.items()
        for n, prompt in enumerate(prompts)
    ]
    for name in answers:
        job.log.write("sample", step=0, model=name, prompt=prompts[0].table["prompt"], text=answers[name].texts[0])
    atomic_lines(job.out / ANSWERS, lines)
    atomic_lines(job.out / TABLE, table)
    return {f"{r['model']}/{r['task']}/{r['metric']}": r["value"] for r in table}


def open_prompts(data: Input, tokenizer: Tokenizer, context: int, settings: JudgeSettings) -> list[Prompt]:
    """What stands before the first learned token of each held-out document; of pairs once.

    Args:
        context: the shortest of the models', which all of them answer within.

    Raises:
        UserError: no prompt leaves room for an answer.
    """
    store = Store.open(data.path / "val", tokenizer=tokenizer.fingerprint)
    found = []
    for document in range(0, store.documents, store.group):
        start, end = store.span(document)
        mask = store.columns["mask"].read(start, end) != 0
        ids = store.ids.read(start, start + int(mask.argmax()) if mask.any() else end).astype(np.int64)
        if len(ids) < context:
            found.append(Prompt(ids, prompt_table(ids, store.identity(document).get("extra"), tokenizer)))
    if not found:
        raise UserError(
            f"data: '{settings.data}' holds out no prompt shorter than the context of {context:,} tokens; "
            "raise its holdout.share, or name another corpus"
        )
    most = min(settings.prompts, len(found))
    return [found[n * len(found) // most] for n in range(most)]


def _answer(
    job: Job, settings: JudgeSettings, name: str, stage: Input, base: Loaded, prompts: Sequence[Prompt]
) -> Answers:
    own = name == settings.against
    loaded = base if own else load_model(stage.path, job.display.say, settings.device, exact=True)
    sampling = sampling_for(base.tokenizer, max_new=settings.max_new, temperature=settings.temperature)
    size, completions = rows_per_pass(min(loaded.config.context, base.config.context)), list[Completion]()
    with job.display.bar(f"{name} answers", len(prompts), "prompts") as bar:
        for start in range(0, len(prompts), size):
            ids = [prompt.ids for prompt in prompts[start : start + size]]
            keys = [(start + n, 0) for n in range(len(ids))]
            completions += generate(loaded.model, ids, sampling, seed=job.seed, keys=keys)
            bar.advance(len(ids))
    logps = None
    if settings.temperature == 1 and not own:
        requests = [(p.ids, c.ids) for p, c in zip(prompts, completions, strict=True)]
        fits = np.array([len(prompt) + len(ids) <= base.config.context + 1 for prompt, ids in requests])
        logps = np.full(len(fits), np.nan)
        logps[fits] = [one.logp for one in score(base.model, [requests[n] for n in np.flatnonzero(fits)])]
    return Answers(completions, [completion_text(base.tokenizer, c) for c in completions], logps)


def _described(name: str, found: Answers, settings: JudgeSettings) -> Iterator[dict[str, Any]]:
    """What needs no judge: length, stops, repetition; of samples at temperature 1 the entropy and the KL."""
    tokens, n = found.tokens, len(found.texts)
    told: dict[str, dict[str, Any]] = {
        "tokens": ratio(tokens, np.ones(n)),
        "stopped": wilson(sum(c.stop_reason == "stop" for c in found.completions), n),
    }
    repeats = np.array([distinct([c.ids.tolist()]) for c in found.completions])
    told["distinct_2"] = ratio(repeats, np.ones(n))
    if settings.temperature == 1:
        own = np.array([float(c.logps.sum(dtype=np.float64)) for c in found.completions])
        told["entropy_nats"] = ratio(-own, tokens)
        if found.logps is not None and (known := ~np.isnan(found.logps)).any():
            told["kl_nats"] = ratio((own - found.logps)[known], np.ones(known.sum()))
    yield from ({"model": name, "task": "answers", "metric": metric, **row} for metric, row in told.items())


def _judged(
    job: Job,
    settings: JudgeSettings,
    judge: str,
    prompts: Sequence[Prompt],
    answers: dict[str, Answers],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Table rows of one judge, and what it said of every answer (of a model that compares: of ours)."""
    base, table = answers[settings.against], []
    others = {name: found for name, found in answers.items() if name != settings.against}

    def add(model: str, rows: Iterator[dict[str, Any]]) -> None:
        table.extend({"model": model, "task": judge, **row} for row in rows)

    stage = job.inputs.get(f"judge:{judge}")
    if stage is not None and not _scores(stage):
        compare = _Comparison(job, settings, judge, stage, prompts)
        said = {}
        for name, found in others.items():
            first, second = compare(found.texts, base.texts), 1 - compare(base.texts, found.texts)
            said[name] = (first + second) / 2
            add(name, winrate.rows(winrate.by_both_orders(first, second), found.tokens, base.tokens))
            add(name, winrate.order_rows(first, second))
        return table, said
    scorer = _function(judge) if stage is None else _reward_model(job, settings, stage)
    said = {name: scorer(prompts, found) for name, found in answers.items()}
    add(settings.against, winrate.score_rows(said[settings.against], None))
    for name, found in others.items():
        verdicts = winrate.by_scores(said[name], said[settings.against], settings.tie)
        if np.isnan(verdicts).all():
            raise UserError(
                f"by: '{judge}' could score no prompt for both {name} and {settings.against}; mend the function, or "
                "take a reward model of a longer context"
            )
        add(name, winrate.rows(verdicts, found.tokens, base.tokens))
        add(name, winrate.score_rows(said[name], said[settings.against]))
    return table, said


def _scores(stage: Input) -> bool:
    """Whether a stage is a reward model."""
    return scores_rows(stage.settings())


Score = Callable[[Sequence[Prompt], Answers], np.ndarray]
"""Scores of answers, NaN where there is none."""


def _function(name: str) -> Score:
    assert is_function(name), name
    function = load_function(name, "by")
    return lambda prompts, found: np.array(ask(name, function, [p.table for p in prompts], found.texts, "by"))


def _reward_model(job: Job, settings: JudgeSettings, stage: Input) -> Score:
    rewards = RewardStage(stage, job, settings.device)

    def scored(prompts: Sequence[Prompt], found: Answers) -> np.ndarray:
        return rewards([np.concatenate([p.ids, c.ids]) for p, c in zip(prompts, found.completions, strict=True)])

    return scored


class _Comparison:
    """A language model that is shown two answers: the probability it gives to the first one."""

    def __init__(self, job: Job, settings: JudgeSettings, name: str, stage: Input, prompts: Sequence[Prompt]):
        loaded = load_model(stage.path, job.display.say, settings.device, exact=True)
        self._examinee = Examinee(loaded.model, loaded.tokenizer, converses(stage.path, loaded.tokenizer))
        self._prompts, self._question, self._bar = prompts, settings.question, job.display.bar
        self._name = name

    def __call__(self, first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        asked = [
            ASKED.format(prompt=prompt.table["prompt"], a=a, b=b, question=self._question)
            for prompt, a, b in zip(self._prompts, first, second, strict=True)
        ]
        pairs = [(text, choice) for text in asked for choice in (" A", " B")]
        with self._bar(f"{self._name} judges", len(pairs), "answers") as bar:
            nats_P2 = np.array(self._examinee.nats(pairs, self._examinee.chats, bar.advance)).reshape(-1, 2)
        return 1 / (1 + np.exp(nats_P2[:, 0] - nats_P2[:, 1]))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
