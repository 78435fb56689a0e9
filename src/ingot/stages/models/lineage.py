"""What a model comes from: the stages that it was started from, as far back as they are there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ingot.core.artifact import RECORD
from ingot.core.errors import UserError
from ingot.stages.job import in_role, inputs_of, open_stage
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.settings import TURNS


def ancestry(stage: Path) -> Iterator[Path]:
    """A stage, the one that it was started from, and so on."""
    while (stage / RECORD).exists():
        yield stage
        if (init := inputs_of(stage).get("init")) is None:
            return
        stage = init.path


def conversed(stage: Path) -> bool | None:
    """Whether a model or one of its ancestors was trained on conversations.

    Returns: None where it cannot be known: of a model made elsewhere, or where what was read is gone.
    """
    with contextlib.suppress(UserError):
        if open_stage(stage)["kind"] == "train":
            inputs = inputs_of(stage)
            if any(Store.open(data.path / "val").content != "text" for data in in_role(inputs, "data").values()):
                return True
            return conversed(inputs["init"].path) if "init" in inputs else False
    return None


def converses(stage: Path, tokenizer: Tokenizer) -> bool:
    """Whether a model was trained on conversations; of one made elsewhere, whether it came with a chat format."""
    known = conversed(stage)
    return tokenizer.template not in ("", TURNS) if known is None else known
