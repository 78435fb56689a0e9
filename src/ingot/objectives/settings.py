"""Settings of the objectives, apart from their code so that a recipe is read without torch."""

from typing import Literal

from ingot.core.recipe import Settings


class LanguageModelSettings(Settings):
    """`objective = { kind = "lm" }`, the default: next-token prediction over every labelled target."""

    kind: Literal["lm"] = "lm"
