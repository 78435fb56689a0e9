"""The kind `train`: what a train stage reads, and what other kinds share with it."""

from typing import Any

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import UserError
from ingot.objectives.settings import OBJECTIVES, scores_rows
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.kind import LOADING, MODEL
from ingot.stages.training.settings import TrainSettings

READ = ("text", "chat")
"""Formats of which a model's likelihood is measured; they may be replayed under any objective."""


def check_format(corpus: str, known: tuple[str, ...], setting: str, what: str, resolve: Resolve) -> None:
    """Refuse a corpus of another format."""
    form = resolve.format_of(corpus)
    if form not in known:
        resolve.refuse(
            setting,
            f"'{corpus}' has format = \"{form}\", but {what} {' and '.join(known)}; name a corpus of one of these",
        )


def companion(role: str, name: str, tokenizer: Node, setting: str, resolve: Resolve, *, scores: bool = False) -> Node:
    """A frozen model that a stage reads beside another: of the same tokens.

    Args:
        scores: whether it must be a reward model.
    """
    node = resolve.model(name, f"{setting} ({role})".strip())
    if scores and not scores_rows(node.settings):
        resolve.refuse(
            setting,
            f"'{name}' is no reward model, expected a train stage with objective = \"reward\", or a function "
            '"file.py:function"',
        )
    if node.inputs["tokenizer"].key != tokenizer.key:
        resolve.refuse(
            setting,
            f"its {role} '{name}' reads the tokens of '{node.inputs['tokenizer'].name}', expected '{tokenizer.name}', "
            "the tokenizer of this stage: the same text would be other tokens; train one of the two anew",
        )
    return node


def importance(name: str, tokenizer: Node, setting: str, resolve: Resolve) -> Node:
    """A fisher stage of a model with that tokenizer."""
    node = resolve.stage(name, setting, "importance")
    if node.inputs["tokenizer"].key != tokenizer.key:
        resolve.refuse(
            setting,
            f"'{name}' is of a model that reads '{node.inputs['tokenizer'].name}', expected '{tokenizer.name}'; an "
            "importance of weights holds for the model it was measured on, and those trained from it",
        )
    return node


def _reads(settings: TrainSettings, resolve: Resolve) -> dict[str, Node]:
    inputs: dict[str, Node] = {}
    if settings.init:
        inputs["init"] = resolve.model(settings.init, "init")
        inputs["tokenizer"] = inputs["init"].inputs["tokenizer"]
    else:
        assert settings.tokenizer
        inputs["tokenizer"] = resolve.stage(settings.tokenizer, "tokenizer", "tokenizer")
    for corpus in settings.corpora:
        inputs[f"data:{corpus}"] = resolve.tokens(corpus, inputs["tokenizer"], "data")
    _check_data(settings, resolve)
    scoring = settings.objective.scoring_roles
    for role, stage in settings.companions().items():
        scores = role in scoring
        inputs[f"companion:{role}"] = companion(role, stage, inputs["tokenizer"], "", resolve, scores=scores)
    for stage in settings.fishers:
        inputs[f"fisher:{stage}"] = importance(stage, inputs["tokenizer"], "penalties", resolve)
    _check_room(settings, inputs.get("init"), resolve)
    return inputs


def _check_data(settings: TrainSettings, resolve: Resolve) -> None:
    """Every mixture has a corpus that the objective learns from; running text and conversations may be replayed."""
    kind = settings.objective.kind
    own = OBJECTIVES[kind].formats
    for part in settings.parts:
        found = {name: resolve.format_of(name) for name in settings.mixture(part)}
        if found and not set(found.values()) & set(own):
            check_format(next(iter(found)), own, "data", f"objective {kind} learns from", resolve)
    for corpus in settings.corpora:
        known = tuple(dict.fromkeys((*own, *READ)))
        check_format(corpus, known, "data", f"objective {kind} learns from and replays", resolve)


def _check_room(settings: TrainSettings, init: Node | None, resolve: Resolve) -> None:
    """Completions fit beside their prompts; where the context comes with files, the stage itself finds out."""
    came = init and _context(init)
    try:
        for part in settings.parts:
            if context := settings.context_of(part, came or 0):
                settings.objective.room_for_prompts(context)
    except UserError as error:
        raise UserError(f"{resolve.where}.{error}") from None


def _context(node: Node) -> int | None:
    """The longest rows of a model, as far as the recipe says it."""
    settings = node.settings
    if not isinstance(settings, TrainSettings):
        return None
    came = settings.model.context if settings.model else _context(node.inputs["init"])
    return came and settings.longest(came)


def _facts(settings: TrainSettings) -> dict[str, Any]:
    facts: dict[str, Any] = {"duration": settings.duration or "", "data": settings.data or settings.corpora}
    facts |= {"init": settings.init} if settings.init else {}
    return facts | ({"adapter": settings.adapter.kind} if settings.adapter else {})


def _digest(settings: TrainSettings, hashes: FileHashes) -> str | None:
    """The user's own functions that the stage calls."""
    files = [hashes.digest(file) for file in settings.objective.files()]
    return digest_json(files) if files else None


def _sleeps(settings: TrainSettings) -> bool:
    return not OBJECTIVES[settings.objective.kind].samples


TRAIN = Kind(
    TrainSettings,
    16,
    "ingot.stages.training.build:run",
    (
        *MODEL,
        *("data", "optim", "distributed", "train", "objectives"),
        *LOADING,
        "stages/evaluation/fisher.py",
        *(
            f"stages/training/{name}.py"
            for name in (
                *("build", "data", "evaluation", "penalties"),
                *("phases", "reference_columns", "timeline"),
            )
        ),
    ),
    makes="model",
    reads=_reads,
    facts=_facts,
    seeded=True,
    raw=_digest,
    sleeps_between_loops=_sleeps,
    forecast="ingot.stages.training.plan_inputs:forecast_of",
    panel="ingot.report.html.panels_model:train",
)
