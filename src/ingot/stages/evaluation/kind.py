"""The kinds that measure finished models: `evaluate`, `judge` and `fisher`."""

from typing import Any

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import UserError
from ingot.core.functions import is_function, require_file
from ingot.evaluate.tasks import load_task, task_file
from ingot.objectives.settings import scores_rows
from ingot.stages.evaluation.settings import EvaluateStageSettings, FisherSettings, JudgeSettings
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.kind import LOADING, MODEL
from ingot.stages.training.kind import READ, check_format, companion, importance

_WITH_PROMPTS = ("chat", "prompts", "pairs")
"""Formats that hold prompts."""


# -- evaluate ----------------------------------------------------------------------------------------------------------


def _evaluate_reads(settings: EvaluateStageSettings, resolve: Resolve) -> dict[str, Node]:
    models = [resolve.model(name, "models") for name in settings.models]
    inputs = {f"model:{model.name}": model for model in models}
    corpora = settings.data or _trained_on(settings, resolve)
    for model in models:
        for corpus in corpora:
            tokens = resolve.tokens(corpus, model.inputs["tokenizer"], "data")
            check_format(corpus, READ, "data", "likelihood is measured on", resolve)
            inputs[f"data:{tokens.name}"] = tokens
    return inputs


def _trained_on(settings: EvaluateStageSettings, resolve: Resolve) -> list[str]:
    """The corpora that the models were trained on; there may be none where tasks are run."""
    found: dict[str, None] = {}
    for model in settings.models:
        corpora = getattr(resolve.settings_of(model), "corpora", [])
        found |= dict.fromkeys(name for name in corpora if resolve.format_of(name) in READ)
    if not found and not settings.tasks:
        resolve.refuse(
            "data",
            "missing, and this recipe trains no model here on running text or conversations; name the corpora to "
            "evaluate on",
        )
    return list(found)


def _evaluate_digest(settings: EvaluateStageSettings, hashes: FileHashes) -> str | None:
    """The task files; also that each can be read, and that code may be run where one asks for it."""
    for name in settings.tasks:
        if not settings.run_code and any(item.kind == "code" for item in load_task(name).items):
            raise UserError(
                f"tasks: '{name}' runs code that a model wrote; allow it with run_code = true (each program gets a "
                "process of its own without network or files, with limits), or leave the task out"
            )
    return digest_json([hashes.digest(task_file(name)) for name in settings.tasks]) if settings.tasks else None


EVALUATE = Kind(
    EvaluateStageSettings,
    8,
    "ingot.stages.evaluation.evaluate:run",
    (*MODEL, "data", "evaluate", *LOADING, "stages/evaluation/evaluate.py", "stages/evaluation/forgetting.py"),
    reads=_evaluate_reads,
    facts=lambda settings: {"models": settings.models},
    seeded=True,
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
    check_format(settings.data, _WITH_PROMPTS, "data", "prompts are taken from", resolve)
    for name in settings.by:
        if not is_function(name):
            node = resolve.model(name, "by")
            scores = scores_rows(node.settings)
            inputs[f"judge:{name}"] = companion("judge", name, tokenizer, "by", resolve) if scores else node
    return inputs


def _judge_facts(settings: JudgeSettings) -> dict[str, Any]:
    return {"models": settings.models, "against": settings.against, "by": settings.by}


def _judge_digest(settings: JudgeSettings, hashes: FileHashes) -> str | None:
    """The user's own functions that judge."""
    functions = [name for name in settings.by if is_function(name)]
    return digest_json([hashes.digest(require_file(name, "by")) for name in functions]) if functions else None


JUDGE = Kind(
    JudgeSettings,
    5,
    "ingot.stages.evaluation.judge:run",
    (
        *MODEL,
        *("data", "evaluate", "objectives"),
        *LOADING,
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
        check_format(corpus, READ, "data", "a fisher stage reads", resolve)
    if settings.previous:
        inputs["previous"] = importance(settings.previous, inputs["tokenizer"], "previous", resolve)
    return inputs


FISHER = Kind(
    FisherSettings,
    1,
    "ingot.stages.evaluation.fisher:run",
    (
        *MODEL,
        *("data", "distributed", "evaluate/bootstrap.py", "evaluate/fisher.py"),
        *LOADING,
        *("stages/evaluation/fisher.py", "stages/training/data.py"),
    ),
    makes="importance",
    reads=_fisher_reads,
    seeded=True,
    panel="ingot.report.html.panels:fisher",
)
