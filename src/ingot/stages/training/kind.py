"""The kind `train`: the inputs of a train stage, and checks of inputs that other kinds use too."""

from collections.abc import Iterable
from typing import Any

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import UserError
from ingot.model.config import RopeScaling, max_context
from ingot.objectives.settings import OBJECTIVES, scores_rows
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.imports import read_model_config
from ingot.stages.models.kind import LOADING_SOURCES, MODEL_SOURCES
from ingot.stages.models.settings import ImportSettings
from ingot.stages.training.settings import TrainSettings

LIKELIHOOD_FORMATS = ("text", "chat")
"""Corpus formats on which a likelihood can be measured. They may be replayed under any objective."""


def check_format(corpus: str, formats: tuple[str, ...], setting: str, use: str, resolve: Resolve) -> None:
    """Raise a UserError unless a corpus has one of the formats.

    Args:
        corpus: name of the corpus.
        formats: accepted formats.
        setting: the setting that names the corpus, for errors.
        use: the beginning of "USE text and chat" in the error, such as "a fisher stage reads".
        resolve: the resolver of the stage.
    """
    form = resolve.format_of(corpus)
    if form not in formats:
        resolve.refuse(
            setting,
            f"'{corpus}' has format = \"{form}\", but {use} {' and '.join(formats)}; name a corpus of one of these",
        )


def holds_out(corpus: str, resolve: Resolve) -> bool:
    """Whether a corpus holds out text for validation. Generated and labelled corpora have the splits of their data."""
    settings = resolve.settings_of(corpus)
    while source := getattr(settings, "corpus", None) or getattr(settings, "data", None):
        settings = resolve.settings_of(source)
    holdout = getattr(settings, "holdout", None)
    return holdout is None or holdout.fraction > 0


def check_held_out(corpora: Iterable[str], setting: str, use: str, resolve: Resolve) -> None:
    """Raise a UserError unless one of the corpora holds out text.

    Args:
        corpora: names of the corpora.
        setting: the setting that names them, for errors.
        use: the beginning of "USE held-out text" in the error, such as "prompts are taken from".
        resolve: the resolver of the stage.
    """
    names = list(corpora)
    if names and not any(holds_out(name, resolve) for name in names):
        resolve.refuse(
            setting,
            f"{use} held-out text, but {', '.join(names)} holds nothing out; set holdout.fraction above 0 there, for "
            "example 0.05, or name another corpus",
        )


def companion(role: str, name: str, tokenizer: Node, setting: str, resolve: Resolve, *, scores: bool = False) -> Node:
    """Resolve a frozen model that a stage uses beside its own, and check that both have the same tokenizer.

    Args:
        role: role of the model, such as `reference`.
        name: its stage or directory.
        tokenizer: the tokenizer of the stage.
        setting: the setting that names it, for errors.
        resolve: the resolver of the stage.
        scores: whether it must be a reward model.
    """
    node = resolve.model(name, f"{setting} ({role})".strip())
    if scores and not scores_rows(node.settings):
        resolve.refuse(
            setting,
            f"'{name}' is not a reward model, expected a train stage with objective = \"reward\", or a function "
            '"file.py:function"',
        )
    if (own := node.inputs["tokenizer"]).key != tokenizer.key:
        resolve.refuse(
            setting,
            f"its {role} '{name}' has the tokenizer '{own.name}', expected '{tokenizer.name}', the tokenizer of this "
            "stage; train one of the two again",
        )
    return node


def importance(name: str, tokenizer: Node, setting: str, resolve: Resolve) -> Node:
    """Resolve a fisher stage, and check that its model has the tokenizer."""
    node = resolve.stage(name, setting, "importance")
    if (own := node.inputs["tokenizer"]).key != tokenizer.key:
        resolve.refuse(
            setting,
            f"'{name}' is of a model with the tokenizer '{own.name}', expected '{tokenizer.name}'; name a fisher stage "
            "of the model that is trained",
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
    """Check that every mixture has a corpus for the objective. Other corpora of text or conversations are replayed."""
    kind = settings.objective.kind
    own = OBJECTIVES[kind].formats
    for phase in settings.phases_or_default:
        formats = {name: resolve.format_of(name) for name in settings.mixture(phase)}
        if formats and not set(formats.values()) & set(own):
            check_format(next(iter(formats)), own, "data", f"objective {kind} learns from", resolve)
    if OBJECTIVES[kind].scores:  # the mean and deviation of its scores are part of a reward model
        pairs = [name for name in settings.corpora if resolve.format_of(name) in own]
        check_held_out(pairs, "data", "a reward model is calibrated on", resolve)
    for corpus in settings.corpora:
        known = tuple(dict.fromkeys((*own, *LIKELIHOOD_FORMATS)))
        check_format(corpus, known, "data", f"objective {kind} learns from and replays", resolve)


def _check_room(settings: TrainSettings, init: Node | None, resolve: Resolve) -> None:
    """Check that rows are not longer than the model of `init` was made for, and have room for completions."""
    initial = _context(init) if init else None
    try:
        if initial:
            settings.trained_context(initial[0], max_context(*initial))
        for phase in settings.phases_or_default:
            if context := settings.context_of(phase, initial[0] if initial else 0):
                settings.objective.max_prompt_tokens(context)
    except UserError as error:
        raise UserError(f"{resolve.where}.{error}") from None


def _context(node: Node) -> tuple[int, RopeScaling | None] | None:
    """The context and RoPE scaling of a model's stage; None where its files are missing or not readable."""
    settings = node.settings
    if isinstance(settings, ImportSettings):
        try:
            config = read_model_config(settings.path)
        except UserError:
            return None  # the import stage reports it
        return config.context, config.rope_scaling
    if not isinstance(settings, TrainSettings):
        return None
    initial = (settings.model.context, settings.model.rope_scaling) if settings.model else _context(node.inputs["init"])
    return initial and (settings.trained_context(initial[0], max_context(*initial)), initial[1])


def _facts(settings: TrainSettings) -> dict[str, Any]:
    facts: dict[str, Any] = {"duration": settings.duration or "", "data": settings.data or settings.corpora}
    facts |= {"init": settings.init} if settings.init else {}
    return facts | ({"adapter": settings.adapter.kind} if settings.adapter else {})


def _digest(settings: TrainSettings, hashes: FileHashes) -> str | None:
    """Digest of the files of user functions."""
    files = [hashes.digest(file) for file in settings.objective.files()]
    return digest_json(files) if files else None


def _short_spin(settings: TrainSettings) -> bool:
    return not OBJECTIVES[settings.objective.kind].on_policy


TRAIN = Kind(
    TrainSettings,
    18,
    "ingot.stages.training.build:run",
    (
        *MODEL_SOURCES,
        *("data", "optim", "distributed", "train", "objectives"),
        *LOADING_SOURCES,
        "stages/models/importance.py",
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
    short_spin=_short_spin,
    forecast="ingot.stages.training.plan_inputs:forecast_of",
    panel="ingot.report.html.panels_model:train",
)
