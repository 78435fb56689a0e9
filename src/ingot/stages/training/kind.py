"""The kind `train`: the inputs of a train stage, and checks of inputs that other kinds use too."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ingot.core.artifact import digest_json
from ingot.core.errors import UserError
from ingot.core.file_hashes import FileHashes
from ingot.model.config import ModelConfig, RopeScaling, max_context
from ingot.objectives.settings import OBJECTIVES, DistillSettings, scores_rows
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.imports import leaves_out_reward_head, read_model_config
from ingot.stages.models.kind import LOADING_SOURCES, MODEL_SOURCES
from ingot.stages.models.settings import ImportSettings
from ingot.stages.tokenize.settings import TokenFilesSettings
from ingot.stages.training.annotate_settings import AnnotateSettings
from ingot.stages.training.initial_layers import initial_layers
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
    if isinstance(settings, TokenFilesSettings):
        return bool(settings.val)
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
            f"{use} held-out text, but {', '.join(names)} holds nothing out; set holdout.fraction above 0 "
            "there (val of token files), for example 0.05, or name another corpus",
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
    if scores:
        check_reward_head(node, setting, resolve)
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
            f"stage; {_share(own)}",
        )
    return node


def _share(tokenizer: Node) -> str:
    """What to do where two models have different tokenizers."""
    if ":" not in tokenizer.name:  # a stage of the recipe
        return "train one of the two again"
    return (
        'make its tokenizer a stage of this recipe (kind = "tokenizer", type = "file") that the model\'s import stage '
        "and this stage name"
    )


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
        if role == "teacher" and isinstance(resolve.settings_of(stage), AnnotateSettings):
            inputs[f"stored:{role}"] = _stored(stage, settings, inputs, resolve)
            continue
        scores = role in scoring
        if role == "teacher":
            _check_predicts(resolve.model(stage, "objective.teacher"), "objective.teacher", resolve)
        inputs[f"companion:{role}"] = companion(role, stage, inputs["tokenizer"], "", resolve, scores=scores)
    for stage in settings.fishers:
        inputs[f"fisher:{stage}"] = importance(stage, inputs["tokenizer"], "penalties", resolve)
    _check_room(settings, inputs.get("init"), resolve)
    if (layers := settings.init_layers) is not None and (depth := _depth(inputs["init"])):
        _at(resolve, lambda: initial_layers(layers, depth))
    _check_layers(settings, inputs, resolve)
    return inputs


def _check_layers(settings: TrainSettings, inputs: dict[str, Node], resolve: Resolve) -> None:
    """Check that a teacher runs beside the student whose layers learn from its layers, and that these are there."""
    objective = settings.objective
    if not isinstance(objective, DistillSettings) or not objective.reads_layers:
        return
    named = "features" if objective.features else "relations"
    if "stored:teacher" in inputs:
        resolve.refuse(
            f"objective.{named}",
            f"'{objective.teacher}' has stored predictions, expected a train or import stage, which has layers; name "
            "the teacher itself",
        )
    student, teacher = _trained_depth(settings, inputs), _depth(inputs["companion:teacher"])
    if student and teacher:
        _at(resolve, lambda: objective.layer_maps(student, teacher))


def _at(resolve: Resolve, check: Callable[[], Any]) -> None:
    """Run a check, and name the stage in its error."""
    try:
        check()
    except UserError as error:
        raise UserError(f"{resolve.where}.{error}") from None


def _depth(node: Node) -> int | None:
    """The number of blocks of a model's stage; None where it is not known yet."""
    if isinstance(node.settings, TrainSettings):
        return _trained_depth(node.settings, node.inputs)
    config = _imported(node)
    return config and config.depth


def _trained_depth(settings: TrainSettings, inputs: Mapping[str, Node]) -> int | None:
    if settings.model:
        return settings.model.depth
    layers = settings.init_layers
    return _depth(inputs["init"]) if layers is None else layers if isinstance(layers, int) else len(layers)


def _imported(node: Node) -> ModelConfig | None:
    """The configuration of a model that a stage imports; None where its files are missing or not readable."""
    try:
        return read_model_config(node.settings.path) if isinstance(node.settings, ImportSettings) else None
    except UserError:
        return None  # the import stage reports it


def check_reward_head(node: Node, setting: str, resolve: Resolve) -> None:
    """Refuse the import of a reward model as one that scores: it has no reward head."""
    if leaves_out_reward_head(node.settings):
        resolve.refuse(
            setting,
            f"'{node.name}' is an import of a reward model, which leaves out the reward head, expected a train stage "
            'with objective = "reward"; put that stage into this recipe and name it',
        )


def _check_predicts(node: Node, setting: str, resolve: Resolve) -> None:
    """Check that a model predicts text."""
    if scores_rows(node.settings) or leaves_out_reward_head(node.settings):
        resolve.refuse(setting, f"'{node.name}' is a reward model, expected one that predicts text; name one")


def _stored(name: str, settings: TrainSettings, inputs: dict[str, Node], resolve: Resolve) -> Node:
    """Resolve the annotate stage of a teacher, and check that it has what the student reads."""
    node, temperature = resolve.stage(name, "objective.teacher", "columns"), settings.objective.stored_temperature
    assert isinstance(node.settings, AnnotateSettings)
    if temperature is None:
        resolve.refuse(
            "objective.teacher",
            f"'{name}' has stored predictions for text that exists, expected a model, which also reads what the "
            f"student writes; name '{node.inputs['teacher'].name}'",
        )
    if (own := node.inputs["tokenizer"]).key != inputs["tokenizer"].key:
        resolve.refuse(
            "objective.teacher",
            f"'{name}' has predictions for the tokenizer '{own.name}', expected '{inputs['tokenizer'].name}', the "
            f"tokenizer of this stage; {_share(own)}",
        )
    for corpus in settings.corpora:
        annotated = node.inputs.get(f"data:{corpus}")
        if annotated is None or annotated.key != inputs[f"data:{corpus}"].key:
            found = "no predictions" if annotated is None else f"predictions for other tokens ('{annotated.name}')"
            resolve.refuse("data", f"'{name}' has {found} for '{corpus}', expected some; add '{corpus}' to its data")
    if temperature not in node.settings.temperatures:
        stored = ", ".join(map(str, node.settings.temperatures))
        resolve.refuse(
            "objective.temperature",
            f"found {temperature}, expected one of {stored}, at which '{name}' has stored the tail; add it to its "
            "temperatures",
        )
    return node


def _check_data(settings: TrainSettings, resolve: Resolve) -> None:
    """Check that every mixture has a corpus for the objective. Other corpora of text or conversations are replayed."""
    kind = settings.objective.kind
    own = OBJECTIVES[kind].formats
    for phase in settings.phases_or_default:
        formats = {name: resolve.format_of(name) for name in settings.mixture(phase)}
        for name, form in formats.items():
            if not settings.is_shuffled(phase) and settings.packing.resolved_kind(form) == "best-fit":
                resolve.refuse(
                    "order", f"found stored for '{name}', which best-fit packs by length; set packing.kind = \"concat\""
                )
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
    if initial:
        _at(resolve, lambda: settings.trained_context(initial[0], max_context(*initial)))
    own = initial[0] if initial else settings.model.context if settings.model else 0
    for phase in settings.phases_or_default:
        if context := settings.context_of(phase, own):
            _at(resolve, lambda context=context: settings.objective.max_prompt_tokens(context))


def _context(node: Node) -> tuple[int, RopeScaling | None] | None:
    """The context and RoPE scaling of a model's stage; None where its files are missing or not readable."""
    settings = node.settings
    if config := _imported(node):
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
    19,
    "ingot.stages.training.build:run",
    (
        *MODEL_SOURCES,
        *("data", "optim", "distributed", "train", "objectives"),
        *LOADING_SOURCES,
        "stages/models/importance.py",
        *(
            f"stages/training/{name}.py"
            for name in (
                *("annotate", "build", "data", "evaluation", "initial_layers", "penalties"),
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


# -- annotate ----------------------------------------------------------------------------------------------------------


def _annotate_reads(settings: AnnotateSettings, resolve: Resolve) -> dict[str, Node]:
    teacher = resolve.model(settings.teacher, "teacher")
    _check_predicts(teacher, "teacher", resolve)
    inputs = {"teacher": teacher, "tokenizer": teacher.inputs["tokenizer"]}
    for corpus in settings.data:
        inputs[f"data:{corpus}"] = resolve.tokens(corpus, inputs["tokenizer"], "data")
        check_format(corpus, LIKELIHOOD_FORMATS, "data", "an annotate stage reads", resolve)
    return inputs


ANNOTATE = Kind(
    AnnotateSettings,
    1,
    "ingot.stages.training.annotate:run",
    (
        *MODEL_SOURCES,
        *("data", "objectives/distill.py", "train/divergences.py"),
        *LOADING_SOURCES,
        *("stages/training/annotate.py", "stages/training/reference_columns.py"),
    ),
    makes="columns",
    reads=_annotate_reads,
    facts=lambda settings: {"teacher": settings.teacher, "data": settings.data, "k": settings.k},
)
