"""Models made elsewhere, as stages: which settings name a directory, and the digest of what lies in it. No torch."""

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
    """Whether an `init` names a directory, not a stage of the recipe."""
    return name.startswith(HF) or "/" in name


def directory_of(path: str) -> Path:
    """The directory that `hf:DIR` (or the path of a stage) names."""
    return Path(path.removeprefix(HF))


def imported_name(path: str) -> str:
    """Name of the derived stage: `hf:gpt2` for "hf:models/gpt2", `run:base` for "runs/other/base"."""
    directory = directory_of(path)
    return f"{'hf' if path.startswith(HF) else 'run'}:{directory.name or directory.resolve().name}"


def model_files(path: str) -> list[Path]:
    """The weights and the configuration of a directory, or what publishes a stage.

    Raises:
        UserError: no such directory, no weights in safetensors, or a stage that has not finished.
    """
    directory = directory_of(path)
    if not directory.is_dir():
        raise MissingFile(f"path: no directory {directory}, expected a model; check the path (nothing is downloaded)")
    if not path.startswith(HF):
        if not StageDir(directory).is_done() or not (directory / MODEL).exists():
            raise UserError(
                f"path: {directory} is no finished train stage; finish its run, or write 'hf:{directory}' for a model "
                "in the Hugging Face layout"
            )
        return [directory / DONE]
    weights = sorted(directory.glob("*.safetensors"))
    if (directory / PEFT_FILES[0]).exists() and not (directory / "config.json").exists():
        raise UserError(
            f"path: {directory} holds an adapter and no model, expected the model that it is for; make it a stage: "
            f'kind = "import", path = "hf:MODEL", adapter = "{directory}"'
        )
    if not weights or not (directory / "config.json").exists():
        found = ", ".join(sorted(f.name for f in directory.iterdir())[:8]) or "nothing"
        raise UserError(
            f"path: {directory} holds {found}, expected config.json and weights as .safetensors; "
            "pickled weights (.bin, .pt) are not read: convert them where you trust them"
        )
    return [*weights, *sorted(directory.glob("*.json"))]


def adapter_files(path: str) -> list[Path]:
    """The two files of an adapter in PEFT's format.

    Raises:
        UserError: one is not there.
    """
    found = [Path(path, name) for name in PEFT_FILES]
    if not all(file.exists() for file in found):
        there = ", ".join(sorted(f.name for f in Path(path).glob("*"))[:8]) or "nothing"
        raise MissingFile(f"adapter: {path} holds {there}, expected {' and '.join(PEFT_FILES)}, as PEFT writes them")
    return found


def read_shape(path: str) -> ModelConfig:
    """The shape of a directory's model, without its weights (and without embeddings that a larger tokenizer adds)."""
    return (hf_config.read_config if path.startswith(HF) else read_config)(directory_of(path))


def import_digest(settings: Settings, hashes: FileHashes) -> str:
    """Digest of a model's directory by content: its weights and its configuration."""
    assert isinstance(settings, ImportSettings)
    files = model_files(settings.path)
    if files[0].name == DONE:  # it holds the digest of every output
        content = json.loads(files[0].read_text())["outputs"]
    else:
        content = {f.name: hashes.digest(f) for f in files}
    if settings.adapter:
        content |= {f"adapter/{f.name}": hashes.digest(f) for f in adapter_files(settings.adapter)}
    return digest_json(content)
