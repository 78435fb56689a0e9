"""The kind `import`: an existing model as a stage."""

from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.imports import import_digest
from ingot.stages.models.settings import ImportSettings

LOADING_SOURCES = tuple(f"stages/models/{name}.py" for name in ("backend", "lineage", "load"))
"""Sources of every kind that loads a model (`Kind.sources`)."""
MODEL_SOURCES = ("tokenizer", "store", "model", "infer", "kernels", "backends")
"""Sources of every kind that runs a model (`Kind.sources`)."""


def import_inputs(settings: ImportSettings, resolve: Resolve) -> dict[str, Node]:
    """The tokenizer: the stage in the settings, or a derived stage with the adapter's or the one in the directory."""
    if settings.tokenizer:
        return {"tokenizer": resolve.stage(settings.tokenizer, "tokenizer", "tokenizer")}
    return {"tokenizer": resolve.directory_tokenizer(settings)}


IMPORT = Kind(
    ImportSettings,
    5,
    "ingot.stages.models.export:import_model",
    ("tokenizer", "store", "model", "convert", "distributed", *LOADING_SOURCES, "stages/models/export.py"),
    makes="model",
    reads=import_inputs,
    raw=import_digest,
)
