"""The kinds that evaluate finished models: `evaluate`, `judge` and `fisher`."""

from pathlib import Path
from typing import Any

from ingot.core.artifact import digest_json
from ingot.core.errors import MissingFile, UserError
from ingot.core.file_hashes import FileHashes
from ingot.core.functions import function_files, is_function
from ingot.evaluate.sandbox import bwrap_problem
from ingot.evaluate.tasks import SUFFIX, load_task, task_file
from ingot.objectives.settings import scores_rows
from ingot.stages.evaluation.settings import EvaluateStageSettings, FisherSettings, JudgeSettings
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.kind import LOADING_SOURCES, MODEL_SOURCES
from ingot.stages.training.kind import (
    LIKELIHOOD_FORMATS,
    check_format,
    check_held_out,
    check_reward_head,
    companion,
    holds_out,
    importance,
)

QUESTIONS = "questions"
"""Role of the corpora of `exact_match`."""
_PROMPT_FORMATS = ("chat", "prompts", "pairs")
"""Corpus formats that contain prompts."""


# -- evaluate ----------------------------------------------------------------------------------------------------------


def _evaluate_reads(settings: EvaluateStageSettings, resolve: Resolve) -> dict[str, Node]:
    models = [resolve.model(name, "models") for name in settings.models]
    inputs = {f"model:{model.name}": model for model in models}
    if settings.teacher:
        tokenizer = resolve.model(settings.teacher, "teacher").inputs["tokenizer"]
        if settings.teacher not in settings.models or len(set(settings.models)) < 2:
            resolve.refuse(
                "teacher",
                f"found '{settings.teacher}' with models {', '.join(settings.models)}, expected one of several models; "
                "add it, or the model that is compared with it, to models",
            )
        for name in settings.models:
            companion("model", name, tokenizer, "models", resolve)
    corpora = settings.data or _trained_on(settings, resolve)
    for corpus in settings.data or ():
        check_held_out([corpus], "data", "likelihood is measured on", resolve)
    encoded: set[tuple[str, ...]] = set()  # equal tokenizers encode a corpus once
    for model in models:
        for corpus in corpora:
            tokens = resolve.tokens(corpus, model.inputs["tokenizer"], "data")
            check_format(corpus, LIKELIHOOD_FORMATS, "data", "likelihood is measured on", resolve)
            keys = tuple(tokens.inputs[role].key for role in ("corpus", "tokenizer"))
            if keys not in encoded:
                inputs[f"data:{tokens.name}"] = tokens
            encoded.add(keys)
    for corpus in settings.exact_match:
        check_format(corpus, ("chat", "prompts"), "exact_match", "questions and answers are taken from", resolve)
        check_held_out([corpus], "exact_match", "questions are taken from", resolve)
        inputs[f"{QUESTIONS}:{corpus}"] = resolve.stage(corpus, "exact_match", "documents")
    return inputs


def _trained_on(settings: EvaluateStageSettings, resolve: Resolve) -> list[str]:
    """The corpora that the models were trained on. There may be none if the stage runs tasks."""
    names: dict[str, None] = {}
    for model in settings.models:
        corpora = getattr(resolve.settings_of(model), "corpora", [])
        names |= dict.fromkeys(name for name in corpora if resolve.format_of(name) in LIKELIHOOD_FORMATS)
    if not (settings.tasks or settings.exact_match):
        check_held_out(names, "data", "likelihood is measured on", resolve)
    names = dict.fromkeys(name for name in names if holds_out(name, resolve))
    if not (names or settings.tasks or settings.exact_match):
        resolve.refuse(
            "data",
            "missing, and no model of this stage is trained on text or conversations in this recipe; name the corpora "
            "to evaluate on",
        )
    return list(names)


def _evaluate_digest(settings: EvaluateStageSettings, hashes: FileHashes) -> str | None:
    """Digest of the task files.

    Raises:
        UserError: an invalid task, one with fewer examples than `shots`, or code that may not or cannot run.
    """
    for name in settings.tasks:
        task = load_task(name)
        if (settings.shots or 0) > len(task.examples):
            raise UserError(
                f"shots: found {settings.shots}, expected at most {len(task.examples)}, the number of examples of the "
                f"task '{name}'; lower it, or evaluate that task in a stage of its own"
            )
        if any(item.kind == "code" for item in task.items):
            if not settings.run_code:
                raise UserError(
                    f"tasks: '{name}' runs code that a model has written; allow it with run_code = true (each program "
                    "runs in a process without network and files, with limits), or leave the task out"
                )
            if settings.sandbox == "bwrap" and (problem := bwrap_problem()):
                raise MissingFile(f"tasks: '{name}': {problem}")
    return digest_json([hashes.digest(task_file(name)) for name in settings.tasks]) if settings.tasks else None


def _task_files(settings: EvaluateStageSettings) -> list[str]:
    return [str(Path(name).expanduser()) for name in settings.tasks if name.endswith(SUFFIX)]


EVALUATE = Kind(
    EvaluateStageSettings,
    11,
    "ingot.stages.evaluation.evaluate:run",
    (
        *MODEL_SOURCES,
        *("data", "evaluate"),
        *LOADING_SOURCES,
        *("stages/evaluation/evaluate.py", "stages/evaluation/exact_match.py", "stages/evaluation/forgetting.py"),
        *("stages/evaluation/teacher.py", "stages/training/initial_layers.py", "train/divergences.py"),
    ),
    reads=_evaluate_reads,
    facts=lambda settings: {"models": settings.models},
    seeded=True,
    evaluates=_task_files,
    raw=_evaluate_digest,
    panel="ingot.report.html.panels_model:evaluate",
)


# -- judge -------------------------------------------------------------------------------------------------------------


def _judge_reads(settings: JudgeSettings, resolve: Resolve) -> dict[str, Node]:
    against = resolve.model(settings.against, "against")
    tokenizer = against.inputs["tokenizer"]
    inputs = {"against": against}
    for name in settings.models:
        inputs[f"model:{name}"] = companion("model", name, tokenizer, "", resolve)
    inputs["data"] = resolve.tokens(settings.data, tokenizer, "data")
    check_format(settings.data, _PROMPT_FORMATS, "data", "prompts are taken from", resolve)
    check_held_out([settings.data], "data", "prompts are taken from", resolve)
    for name in settings.by:
        if not is_function(name):
            node = resolve.model(name, "by")
            check_reward_head(node, "by", resolve)
            scores = scores_rows(node.settings)
            inputs[f"judge:{name}"] = companion("judge", name, tokenizer, "by", resolve) if scores else node
    return inputs


def _judge_facts(settings: JudgeSettings) -> dict[str, Any]:
    return {"models": settings.models, "against": settings.against, "by": settings.by}


def _judge_digest(settings: JudgeSettings, hashes: FileHashes) -> str | None:
    """Digest of the files of judges that are user functions."""
    files = [file for name in settings.by if is_function(name) for file in function_files(name, "by")]
    return digest_json([hashes.digest(file) for file in files]) if files else None


JUDGE = Kind(
    JudgeSettings,
    6,
    "ingot.stages.evaluation.judge:run",
    (
        *MODEL_SOURCES,
        *("data", "evaluate", "objectives"),
        *LOADING_SOURCES,
        "stages/evaluation/judge.py",
        "stages/models/reward_scores.py",
    ),
    reads=_judge_reads,
    facts=_judge_facts,
    seeded=True,
    raw=_judge_digest,
    panel="ingot.report.html.panels_judge:judge",
)


# -- fisher ------------------------------------------------------------------------------------------------------------


def _fisher_reads(settings: FisherSettings, resolve: Resolve) -> dict[str, Node]:
    model = resolve.model(settings.model, "model")
    inputs = {"model": model, "tokenizer": model.inputs["tokenizer"]}
    for corpus in settings.data:
        inputs[f"data:{corpus}"] = resolve.tokens(corpus, inputs["tokenizer"], "data")
        check_format(corpus, LIKELIHOOD_FORMATS, "data", "a fisher stage reads", resolve)
    if settings.previous:
        inputs["previous"] = importance(settings.previous, inputs["tokenizer"], "previous", resolve)
    return inputs


FISHER = Kind(
    FisherSettings,
    1,
    "ingot.stages.evaluation.fisher:run",
    (
        *MODEL_SOURCES,
        *("data", "distributed", "evaluate/bootstrap.py", "evaluate/fisher.py"),
        *LOADING_SOURCES,
        *("stages/evaluation/fisher.py", "stages/models/importance.py", "stages/training/data.py"),
    ),
    makes="importance",
    reads=_fisher_reads,
    seeded=True,
    panel="ingot.report.html.panels:fisher",
)
