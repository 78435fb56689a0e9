"""Model directories as inputs of a recipe: names, files and digests. No torch."""

import json
from pathlib import Path

from ingot.convert import hf_config
from ingot.convert.directories import adapter_files, listed, model_weights, not_used, own_tokenizer
from ingot.core.artifact import DONE, StageDir, digest_json, regular
from ingot.core.errors import MissingFile, UserError
from ingot.core.file_hashes import FileHashes
from ingot.core.settings import Settings
from ingot.model.adapter_config import PEFT_FILES
from ingot.model.config import ModelConfig
from ingot.objectives.settings import scores_rows
from ingot.stages.job import MODEL, read_config, read_record
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
        UserError: no such directory, no safetensors weights or two sets of them, or a stage that has not finished.
    """
    directory = directory_of(path)
    if not directory.is_dir():
        raise MissingFile(f"path: no directory {directory}, expected a model; check the path (ingot downloads nothing)")
    if not path.startswith(HF):
        if not StageDir(directory).is_done() or not (directory / MODEL).exists():
            raise UserError(
                f"path: {directory} is not a train stage that is done; finish its run, or write 'hf:{directory}' for a "
                "model in the Hugging Face layout"
            )
        return [directory / DONE]
    if (directory / PEFT_FILES[0]).exists() and not (directory / "config.json").exists():
        raise UserError(
            f"path: {directory} contains an adapter and no model, expected a model; add a stage with "
            f'kind = "import", path = "hf:MODEL", adapter = "{directory}"'
        )
    if not any(directory.glob("*.safetensors")) or not regular(directory / hf_config.CONFIG).exists():
        names = listed(sorted(f.name for f in directory.iterdir()))
        raise UserError(
            f"path: {directory} contains {names}, expected config.json and weights as .safetensors; "
            "convert pickled weights (.bin, .pt) to .safetensors, on a machine that trusts them"
        )
    return [*model_weights(directory), *(file for file in sorted(directory.glob("*.json")) if file.is_file())]


def require_adapter(settings: ImportSettings) -> list[Path]:
    """The files of the adapter that an import merges; none without one.

    Raises:
        UserError: no such adapter, or one beside the model that the setting does not name: tools would load both.
    """
    directory = directory_of(settings.path)
    beside = settings.path.startswith(HF) and (directory / PEFT_FILES[0]).exists()
    if beside and not (settings.adapter and Path(settings.adapter).resolve() == directory.resolve()):
        raise UserError(
            f"path: {directory} contains a model and an adapter ({PEFT_FILES[0]}); to merge the two, set adapter = "
            f'"{directory}" (ingot import: --adapter {directory}), else move the adapter away'
        )
    if not settings.adapter:
        return []
    if not Path(settings.adapter).is_dir():
        raise MissingFile(f"adapter: no directory {settings.adapter}, expected an adapter as PEFT saves it")
    return adapter_files(Path(settings.adapter))


def tokenizer_of(settings: ImportSettings) -> tuple[Path, Path | None]:
    """The directory of the tokenizer, and the file of a chat template that replaces its own.

    Both are those of the adapter where it has them, because it was trained with them.
    """
    directory, adapter = directory_of(settings.path), Path(settings.adapter or "")
    if not settings.adapter or not adapter.is_dir():
        return directory, None
    if own_tokenizer(adapter):
        return adapter, None
    template = adapter / "chat_template.jinja"
    return directory, template if template.is_file() else None


def unused_files(settings: ImportSettings) -> list[str]:
    """The files beside the model's and the adapter's that an import does not use."""
    used: dict[Path, list[Path]] = {}
    if settings.path.startswith(HF):
        directory = directory_of(settings.path)
        used[directory.resolve()] = [*model_weights(directory), directory / hf_config.CONFIG]
    if settings.adapter:
        template = tokenizer_of(settings)[1]
        files = [*adapter_files(Path(settings.adapter)), *([template] if template else [])]
        used.setdefault(Path(settings.adapter).resolve(), []).extend(files)
    return [f"{directory.name}/{name}" for directory, files in used.items() for name in not_used(directory, files)]


def read_model_config(path: str) -> ModelConfig:
    """The configuration of a directory's model, without the embedding rows that a larger tokenizer will add."""
    return (hf_config.read_config if path.startswith(HF) else read_config)(directory_of(path))


def leaves_out_reward_head(settings: object) -> bool:
    """Whether the settings are those of an import of a reward model, of which a language model without its head stays.

    The directory may itself be an import of a reward run. A directory that cannot be read is reported by its own stage.
    """
    if not isinstance(settings, ImportSettings) or settings.path.startswith(HF):
        return False
    try:
        record = read_record(directory_of(settings.path))
        if record["kind"] == "import":
            return leaves_out_reward_head(ImportSettings.model_validate(record["settings"]))
    except (UserError, OSError, ValueError):
        return False
    return scores_rows(record["settings"])


def import_digest(settings: Settings, hashes: FileHashes) -> str:
    """Digest of the content of a model's directory: its weights and its configuration."""
    assert isinstance(settings, ImportSettings)
    files, adapter = model_files(settings.path), require_adapter(settings)
    if files[0].name == DONE:  # DONE contains the digest of every output
        content = json.loads(files[0].read_text())["outputs"]
    else:
        content = {f.name: hashes.digest(f) for f in files}
    if settings.adapter:
        content |= {f"adapter/{f.name}": hashes.digest(f) for f in adapter}
    return digest_json(content)
