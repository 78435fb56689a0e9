"""The kind `import`: a model made elsewhere, as a stage to start from."""

from ingot.core.artifact import FileHashes
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.imports import import_digest
from ingot.stages.models.settings import ImportSettings

LOADING = tuple(f"stages/models/{name}.py" for name in ("backend", "lineage", "load"))
"""Sources of every kind that loads a model."""
MODEL = ("tokenizer", "store", "model", "infer", "kernels", "backends")
"""Sources of every kind that computes one."""


def import_inputs(settings: ImportSettings, resolve: Resolve) -> dict[str, Node]:
    """The tokenizer: a stage's, or the one in the directory as a node of its own."""
    if settings.tokenizer:
        return {"tokenizer": resolve.stage(settings.tokenizer, "tokenizer", "tokenizer")}
    return {"tokenizer": resolve.directory_tokenizer(settings.path)}


def _digest(settings: ImportSettings, hashes: FileHashes) -> str:
    return import_digest(settings, hashes)


IMPORT = Kind(
    ImportSettings,
    3,
    "ingot.stages.models.export:import_model",
    ("tokenizer", "store", "model", "convert", "distributed", *LOADING, "stages/models/export.py"),
    makes="model",
    reads=import_inputs,
    raw=_digest,
)
