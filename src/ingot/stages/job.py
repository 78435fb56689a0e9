"""The input of a builder (`Job`), and readers of the files in a stage's directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ingot.core.artifact import RECORD, RESULT, StageDir, damaged, read_json
from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.core.settings import Settings
from ingot.model.config import ModelConfig

MODEL, TOKENIZER, EXECUTION_FILE = "model.json", "tokenizer.json", "execution.json"
"""Files of a train stage: its `ModelConfig`, its tokenizer, and its execution settings on this machine."""
TABLE, ANSWERS = "table.jsonl", "answers.jsonl"
"""Files of a stage that evaluates models: rows {model, task, metric, value, low, high, n}, and the models' answers."""

T = TypeVar("T")


@dataclass(frozen=True)
class Input:
    """A stage that is an input of another: its name in the recipe, its key and its directory."""

    name: str
    key: str
    path: Path

    def result(self) -> dict[str, Any]:
        return read_result(self.path)

    def settings(self) -> dict[str, Any]:
        return self._record()["settings"]

    @property
    def format(self) -> Any:
        """The format of a stage that makes documents; `score` and `select` have that of their data."""
        settings = self.settings()
        return settings["format"] if "format" in settings else inputs_of(self.path)["data"].format

    def key_of(self, role: str) -> str:
        """Key of an input of this stage."""
        return self._record()["inputs"][role]["key"]

    def name_of(self, role: str) -> str:
        """Name of an input of this stage."""
        return self._record()["inputs"][role]["name"]

    def _record(self) -> dict[str, Any]:
        return read_record(self.path)


@dataclass(frozen=True)
class Job:
    """The argument of a builder."""

    name: str
    settings: Settings
    inputs: Mapping[str, Input]
    """Role -> input, such as `tokenizer` or `data:NAME`; `Kind.reads` defines the roles."""
    seed: int
    out: StageDir
    log: EventLog
    display: Display

    def roles(self, prefix: str) -> dict[str, Input]:
        return in_role(self.inputs, prefix)


def in_role(inputs: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The inputs with the prefix, by the rest of their role (`data:clean` -> `clean`), in name order."""
    return {r.removeprefix(prefix + ":"): inputs[r] for r in sorted(inputs) if r.startswith(prefix + ":")}


def read_record(stage: Path) -> dict[str, Any]:
    """The record of a stage: name, kind, key, settings, inputs and more.

    Raises:
        UserError: not the directory of a stage.
    """
    path = stage / RECORD
    if not path.exists():
        raise UserError(f"{stage}: no {RECORD}, expected a stage's directory, such as runs/NAME/base")
    return _read_table(path, "kind", "settings", "inputs")


def inputs_of(stage: Path) -> dict[str, Input]:
    """The inputs of a stage by role. Their directories are siblings of the stage's own.

    Raises:
        UserError: not the directory of a stage.
    """
    siblings, inputs = stage.resolve().parent, read_record(stage)["inputs"]
    return {role: Input(i["name"], i["key"], siblings / Path(i["dir"]).name) for role, i in inputs.items()}


def tokens_name(corpus: str, tokenizer: str) -> str:
    """The name of the derived stage that encodes a corpus with a tokenizer."""
    return f"{corpus}@{tokenizer}"


def corpus_of(tokens: str) -> str:
    """The corpus of a tokens stage, by the stage's name."""
    return tokens.partition("@")[0]


def read_result(stage: Path) -> dict[str, Any]:
    """A finished stage's metrics.

    Raises:
        UserError: the stage has not finished.
    """
    path = stage / RESULT
    if not path.exists():
        raise UserError(f"{stage}: no {RESULT}, so the stage is not done; `ingot run` it first")
    return _read_table(path)


def _read_table(path: Path, *fields: str) -> dict[str, Any]:
    table = read_json(path)
    if not isinstance(table, dict) or not set(fields) <= table.keys():
        raise damaged(path, "fields")
    return table


def read_config(stage: Path) -> ModelConfig:
    """The configuration of a train stage's model.

    Raises:
        UserError: not a train stage, or its configuration was written by another version of ingot.
    """
    path = stage / MODEL
    if (stage / "config.json").exists() and not path.exists():
        raise UserError(f"{stage}: found the Hugging Face layout; create a stage with `ingot import hf:{stage}`")
    if not path.exists():
        raise UserError(f"{stage}: no {MODEL}, expected the directory of a train stage, such as runs/NAME/base")
    try:
        return ModelConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fields = ", ".join(sorted({".".join(map(str, e["loc"])) or "the object" for e in error.errors()}))
        raise UserError(
            f"{path}: found a configuration that this version cannot read ({fields}), expected the fields of this "
            "version; train the stage again, or use the version that wrote it"
        ) from None
