"""Model directories as inputs of a recipe: names, files and digests. No torch."""

import json
from pathlib import Path

from ingot.convert import hf_config
from ingot.core.artifact import DONE, FileHashes, StageDir, digest_json
from ingot.core.errors import MissingFile, UserError
from ingot.core.settings import Settings
from ingot.model.adapter_config import PEFT_FILES
from ingot.model.config import ModelConfig
from ingot.stages.job import MODEL, read_config
from ingot.stages.models.settings import ImportSettings

HF = "hf:"


def is_directory(name: str) -> bool:
    """Whether the name of a model refers to a directory, and not to a stage of the recipe."""
    return name.startswith(HF) or "/" in name


def directory_of(path: str) -> Path:
    """The directory that `hf:DIR` (or the path of a stage) names."""
    return Path(path.removeprefix(HF))


def imported_name(path: str) -> str:
    """Name of the derived import stage: `hf:gpt2` for "hf:models/gpt2", `run:base` for "runs/other/base"."""
    directory = directory_of(path)
    return f"{'hf' if path.startswith(HF) else 'run'}:{directory.name or directory.resolve().name}"


def model_files(path: str) -> list[Path]:
    """The weight and JSON files of a Hugging Face directory, or the DONE file of a train stage.

    Raises:
        UserError: no such directory, no safetensors weights, or a stage that has not finished.
    """
    directory = directory_of(path)
    if not directory.is_dir():
        raise MissingFile(f"path: no directory {directory}, expected a model; check the path (ingot downloads nothing)")
    if not path.startswith(HF):
        if not StageDir(directory).is_done() or not (directory / MODEL).exists():
            raise UserError(
                f"path: {directory} is not a finished train stage; finish its run, or write 'hf:{directory}' for a "
                "model in the Hugging Face layout"
            )
        return [directory / DONE]
    weights = sorted(directory.glob("*.safetensors"))
    if (directory / PEFT_FILES[0]).exists() and not (directory / "config.json").exists():
        raise UserError(
            f"path: {directory} contains an adapter and no model, expected a model; add a stage with "
            f'kind = "import", path = "hf:MODEL", adapter = "{directory}"'
        )
    if not weights or not (directory / "config.json").exists():
        names = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) or "nothing"
        raise UserError(
            f"path: {directory} contains {names}, expected config.json and weights as .safetensors; "
            "convert pickled weights (.bin, .pt) to .safetensors, on a machine that trusts them"
        )
    return [*weights, *sorted(directory.glob("*.json"))]


def adapter_files(path: str) -> list[Path]:
    """The two files of an adapter in PEFT's format.

    Raises:
        UserError: one does not exist.
    """
    files = [Path(path, name) for name in PEFT_FILES]
    if not all(file.exists() for file in files):
        names = ", ".join(sorted(f.name for f in Path(path).glob("*"))[:8]) or "nothing"
        raise MissingFile(f"adapter: {path} contains {names}, expected {' and '.join(PEFT_FILES)}, as PEFT writes them")
    return files


def read_model_config(path: str) -> ModelConfig:
    """The configuration of a directory's model, without the embedding rows that a larger tokenizer will add."""
    return (hf_config.read_config if path.startswith(HF) else read_config)(directory_of(path))


def import_digest(settings: Settings, hashes: FileHashes) -> str:
    """Digest of the content of a model's directory: its weights and its configuration."""
    assert isinstance(settings, ImportSettings)
    files = model_files(settings.path)
    if files[0].name == DONE:  # DONE contains the digest of every output
        content = json.loads(files[0].read_text())["outputs"]
    else:
        content = {f.name: hashes.digest(f) for f in files}
    if settings.adapter:
        content |= {f"adapter/{f.name}": hashes.digest(f) for f in adapter_files(settings.adapter)}
    return digest_json(content)
