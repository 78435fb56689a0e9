"""The objectives a recipe may name: their settings, apart from their code so that a recipe is read without torch.

Adding one is a file in this room and a line in `OBJECTIVES` (with a settings class above it where it has settings).
"""

import functools
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from ingot.core.recipe import Settings


class LanguageModelSettings(Settings):
    """`objective = { kind = "lm" }`, the default: next-token prediction over every labelled target."""

    kind: Literal["lm"] = "lm"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target spread evenly over the vocabulary; trained on, and no part of the reported loss."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of ln(Z)^2 per token, which keeps logits from drifting (PaLM: 1e-4); no part of the reported loss."""


@dataclass(frozen=True)
class Entry:
    """An objective's settings, and its class as `module:name`, imported where it is built and called with the settings
    but `kind` as keyword arguments."""

    settings: type[Settings]
    builder: str
    formats: tuple[str, ...] = ("text", "chat")
    """Formats of the corpora that it learns from."""


def plain(kind: str) -> type[Settings]:
    """Settings of an objective that has none but its kind."""
    return create_model(f"{kind}_settings", __base__=Settings, kind=(Literal[kind], kind))  # pyright: ignore


OBJECTIVES: dict[str, Entry] = {
    "lm": Entry(LanguageModelSettings, "ingot.objectives.lm:LanguageModel"),
}


def _named(value: Any) -> Any:
    """`objective = "lm"` is short for `{ kind = "lm" }`."""
    return {"kind": value} if isinstance(value, str) else value


def _any_of(members: list[type[Settings]]) -> Any:
    union: Any = functools.reduce(operator.or_, members)
    return Annotated[union, Field(discriminator="kind")] if len(members) > 1 else union


ObjectiveSettings = Annotated[_any_of([e.settings for e in OBJECTIVES.values()]), BeforeValidator(_named)]
"""The type of a recipe's `objective`."""
