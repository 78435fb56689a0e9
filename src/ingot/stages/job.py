"""What a stage's child process is told, and what it hands to the builder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ingot.core.artifact import RECORD, RESULT, StageDir, read_json
from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.core.settings import Settings
from ingot.model.config import ModelConfig

MODEL, TOKENIZER, CHOICES = "model.json", "tokenizer.json", "execution.json"
"""Of stages that make models and tokenizers: a shape, a vocabulary, and how the stage is computed here."""
TABLE, ANSWERS = "table.jsonl", "answers.jsonl"
"""Of stages that judge models: rows {model, task, metric, value, low, high, n}, and what each model answered."""

T = TypeVar("T")


@dataclass(frozen=True)
class Input:
    """A stage this one reads: its name in the recipe, its key, its directory."""

    name: str
    key: str
    path: Path

    def result(self) -> dict[str, Any]:
        return read_result(self.path)

    def settings(self) -> dict[str, Any]:
        return self._record()["settings"]

    def key_of(self, role: str) -> str:
        """Key of one of this stage's own inputs."""
        return self._record()["inputs"][role]["key"]

    def name_of(self, role: str) -> str:
        """Name of one of this stage's own inputs."""
        return self._record()["inputs"][role]["name"]

    def _record(self) -> dict[str, Any]:
        return open_stage(self.path)


@dataclass(frozen=True)
class Job:
    """Everything a builder needs."""

    name: str
    settings: Settings
    inputs: Mapping[str, Input]
    """Role -> input, such as `tokenizer` or `data:NAME`; what a kind reads is in `pipeline/resolve.py`."""
    seed: int
    out: StageDir
    log: EventLog
    display: Display

    def roles(self, prefix: str) -> dict[str, Input]:
        return in_role(self.inputs, prefix)


def in_role(inputs: Mapping[str, T], prefix: str) -> dict[str, T]:
    """`data:clean` -> `clean`, for all roles with the prefix, in name order."""
    return {r.removeprefix(prefix + ":"): inputs[r] for r in sorted(inputs) if r.startswith(prefix + ":")}


def open_stage(stage: Path) -> dict[str, Any]:
    """What a stage was told: name, kind, key, settings, inputs.

    Raises:
        UserError: not the directory of a stage.
    """
    path = stage / RECORD
    if not path.exists():
        raise UserError(f"{stage}: no {RECORD}, expected a stage's directory, such as runs/NAME/base")
    return read_json(path)


def inputs_of(stage: Path) -> dict[str, Input]:
    """Role -> the stages that a stage has read: their directories stand beside its own.

    Raises:
        UserError: not the directory of a stage.
    """
    beside, told = stage.resolve().parent, open_stage(stage)["inputs"]
    return {role: Input(i["name"], i["key"], beside / Path(i["dir"]).name) for role, i in told.items()}


def tokens_name(corpus: str, tokenizer: str) -> str:
    """The name of the stage that encodes a corpus with a tokenizer, where the recipe gives it none."""
    return f"{corpus}@{tokenizer}"


def corpus_of(tokens: str) -> str:
    """The corpus in such a name."""
    return tokens.partition("@")[0]


def read_result(stage: Path) -> dict[str, Any]:
    """A finished stage's numbers.

    Raises:
        UserError: the stage has not finished.
    """
    path = stage / RESULT
    if not path.exists():
        raise UserError(f"{stage}: no {RESULT}, so the stage has not finished; `ingot run` it first")
    return read_json(path)


def read_config(stage: Path) -> ModelConfig:
    """The shape of a train stage's model.

    Raises:
        UserError: not a train stage, or its shape was written by another version.
    """
    path = stage / MODEL
    if (stage / "config.json").exists() and not path.exists():
        raise UserError(f"{stage}: in the Hugging Face layout; make a stage of it with `ingot import hf:{stage}`")
    if not path.exists():
        raise UserError(f"{stage}: no {MODEL}, expected the directory of a train stage, such as runs/NAME/base")
    try:
        return ModelConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fields = ", ".join(sorted({".".join(map(str, e["loc"])) or "the whole" for e in error.errors()}))
        raise UserError(
            f"{path}: found a shape that this version does not read ({fields}), expected all fields of a model of "
            "today; train the stage again, or use the version that wrote it"
        ) from None
