"""The stage kinds: their settings, the version of their code, what they read, and who builds them.

This table is what the parent process knows of a stage, so nothing here imports torch; a builder is named as text and
imported by the child that runs it. `version` is part of every key: raise it when the same settings and inputs give
another result (a test compares the sources with the digest recorded for the version).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import UserError
from ingot.core.functions import is_function, require_file
from ingot.core.recipe import Settings
from ingot.corpus.readers.locate import source_digest
from ingot.corpus.settings import CorpusSettings
from ingot.evaluate.tasks import load_task, task_file
from ingot.stages.evaluation.settings import EvaluateStageSettings, FisherSettings, JudgeSettings
from ingot.stages.models.imports import import_digest
from ingot.stages.synthesis import human_labels
from ingot.stages.synthesis.settings import GenerateSettings, LabelSettings
from ingot.stages.training.settings import ImportSettings, TrainSettings
from ingot.tokenizer import files
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings


@dataclass(frozen=True)
class Kind:
    """One kind of stage."""

    settings: type[Settings]
    version: int
    builder: str
    """`module:function`, called as function(Job) -> result in the child process."""
    sources: tuple[str, ...]
    """Packages and modules (below ingot) that determine the result."""
    seeded: bool = False
    """Whether the run's seed is part of the key."""
    raw: Callable[[Settings, FileHashes], str | None] | None = None
    """Digest of inputs that are no stages (files); None where the settings name none."""
    waits: Callable[[Settings], str | None] | None = None
    """Why a stage cannot be made before people have done something; None when they have."""


def _corpus_digest(settings: Settings, hashes: FileHashes) -> str:
    assert isinstance(settings, CorpusSettings)
    return source_digest(settings, hashes)


def _tokenizer_digest(settings: Settings, hashes: FileHashes) -> str | None:
    assert isinstance(settings, TokenizerSettings)
    return files.source_digest(settings, hashes)


def _evaluate_digest(settings: Settings, hashes: FileHashes) -> str | None:
    """The task files, whole; also that each can be read, and that code may be run where one asks for it."""
    assert isinstance(settings, EvaluateStageSettings)
    for name in settings.tasks:
        if not settings.run_code and any(item.kind == "code" for item in load_task(name).items):
            raise UserError(
                f"tasks: '{name}' runs code that a model wrote; allow it with run_code = true (each program gets a "
                "process of its own without network or files, with limits), or leave the task out"
            )
    return digest_json([hashes.digest(task_file(name)) for name in settings.tasks]) if settings.tasks else None


def _train_digest(settings: Settings, hashes: FileHashes) -> str | None:
    """The user's own functions that the stage calls."""
    assert isinstance(settings, TrainSettings)
    files = [hashes.digest(file) for file in settings.objective.files()]
    return digest_json(files) if files else None


def _judge_digest(settings: Settings, hashes: FileHashes) -> str | None:
    """The user's own functions that judge."""
    assert isinstance(settings, JudgeSettings)
    functions = [name for name in settings.by if is_function(name)]
    return digest_json([hashes.digest(require_file(name, "by")) for name in functions]) if functions else None


def _label_digest(settings: Settings, hashes: FileHashes) -> str | None:
    """The judge's file: a function's, or what people have filled."""
    assert isinstance(settings, LabelSettings)
    if settings.people:
        return human_labels.digest(settings.people, hashes)
    return hashes.digest(require_file(settings.by, "by")) if is_function(settings.by) else None


def _label_waits(settings: Settings) -> str | None:
    assert isinstance(settings, LabelSettings)
    return human_labels.waits(settings.people) if settings.people else None


def _of(room: str, *names: str) -> tuple[str, ...]:
    """Files of a room."""
    return tuple(f"{room}/{name}.py" for name in names)


_TEXT = ("tokenizer", "store")
_MODEL = (*_TEXT, "model", "infer", "kernels", "backends")
_TRAINING = _of(
    "stages/training", "build", "data", "evaluation", "penalties", "phases", "reference_columns", "timeline"
)
_LOADING = _of("stages/models", "lineage", "load")

KINDS: dict[str, Kind] = {
    "corpus": Kind(CorpusSettings, 7, "ingot.stages.corpus:corpus", ("corpus", "stages/corpus.py"), raw=_corpus_digest),
    "tokenizer": Kind(
        TokenizerSettings, 4, "ingot.stages.corpus:tokenizer", (*_TEXT, "stages/corpus.py"), raw=_tokenizer_digest
    ),
    "tokens": Kind(TokensSettings, 5, "ingot.stages.corpus:tokens", (*_TEXT, "stages/corpus.py")),
    "train": Kind(
        TrainSettings,
        15,
        "ingot.stages.training.build:run",
        (
            *_MODEL,
            "data",
            "optim",
            "distributed",
            "train",
            "objectives",
            *_TRAINING,
            "stages/evaluation/fisher.py",
            *_LOADING,
        ),
        seeded=True,
        raw=_train_digest,
    ),
    "import": Kind(
        ImportSettings,
        3,
        "ingot.stages.models.export:import_model",
        (*_TEXT, "model", "convert", "distributed", *_of("stages/models", "export", "load")),
        raw=import_digest,
    ),
    "evaluate": Kind(
        EvaluateStageSettings,
        8,
        "ingot.stages.evaluation.evaluate:run",
        (*_MODEL, "data", "evaluate", *_LOADING, *_of("stages/evaluation", "forgetting", "evaluate")),
        seeded=True,
        raw=_evaluate_digest,
    ),
    "fisher": Kind(
        FisherSettings,
        1,
        "ingot.stages.evaluation.fisher:run",
        (
            *_MODEL,
            "data",
            "distributed",
            *_of("evaluate", "bootstrap", "fisher"),
            "stages/evaluation/fisher.py",
            "stages/training/data.py",
            *_LOADING,
        ),
        seeded=True,
    ),
    "judge": Kind(
        JudgeSettings,
        5,
        "ingot.stages.evaluation.judge:run",
        (
            *_MODEL,
            "data",
            "evaluate",
            "objectives",
            *_LOADING,
            "stages/evaluation/judge.py",
            "stages/models/reward_scores.py",
        ),
        seeded=True,
        raw=_judge_digest,
    ),
    "generate": Kind(
        GenerateSettings,
        2,
        "ingot.stages.synthesis.generate:run",
        (*_MODEL, "distributed", "data/sampler.py", *_LOADING, "stages/synthesis/generate.py"),
        seeded=True,
    ),
    "label": Kind(
        LabelSettings,
        4,
        "ingot.stages.synthesis.label:run",
        (
            *_MODEL,
            "distributed",
            "objectives",
            *_LOADING,
            "stages/models/reward_scores.py",
            *_of("stages/synthesis", "label", "human_labels"),
        ),
        raw=_label_digest,
        waits=_label_waits,
    ),
}

RECIPE_KINDS: dict[str, type[Settings]] = {name: kind.settings for name, kind in KINDS.items()}
"""Kinds a recipe may name."""
