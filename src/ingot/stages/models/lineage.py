"""The lineage of a model: the stages that it was started from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ingot.core.artifact import RECORD
from ingot.core.errors import UserError
from ingot.stages.job import in_role, inputs_of, read_record, read_result
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.settings import TURNS

CONVERSATIONS = "trained_on_conversations"
"""Field in the result of an import of a stage's model."""


def lineage(stage: Path) -> Iterator[Path]:
    """A stage, the stage in its `init`, and so on, as far as the directories exist."""
    while (stage / RECORD).exists():
        yield stage
        if (init := inputs_of(stage).get("init")) is None:
            return
        stage = init.path


def trained_on_conversations(stage: Path) -> bool | None:
    """Whether a model, or a stage that it was started from, was trained on conversations.

    Returns:
        None where that is unknown: for a model in another tool's layout, or where the training data was deleted.
    """
    with contextlib.suppress(UserError):
        kind = read_record(stage)["kind"]
        if kind == "import":
            return read_result(stage).get(CONVERSATIONS)
        if kind == "train":
            inputs = inputs_of(stage)
            if any(Store.open(data.path / "val").content != "text" for data in in_role(inputs, "data").values()):
                return True
            return trained_on_conversations(inputs["init"].path) if "init" in inputs else False
    return None


def is_chat_model(stage: Path, tokenizer: Tokenizer) -> bool:
    """Whether a model was trained on conversations. Where that is unknown: whether it came with a chat template."""
    trained = trained_on_conversations(stage)
    return tokenizer.template not in ("", TURNS) if trained is None else trained
