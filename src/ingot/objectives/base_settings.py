"""Base class of the settings of an objective: the properties that other packages read. No torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from ingot.core.errors import UserError
from ingot.core.settings import Settings, Stage, mark_of

Companion = Annotated[str | None, Stage("model")]
"""The type of a field that names a frozen model; its role is the field's name."""


class MethodSettings(Settings):
    """Settings of an objective; each kind overrides the properties that differ from these defaults."""

    def companions(self) -> dict[str, str | None]:
        """Role -> stage of each frozen model that the objective reads; None means the stage's `init`."""
        fields = type(self).model_fields.items()
        return {
            role: getattr(self, role) for role, field in fields if (mark := mark_of(field)) and mark.makes == "model"
        }

    @property
    def releases_companions(self) -> bool:
        """Whether companions only annotate rows, so that they are released before the first step."""
        return False

    @property
    def scoring_roles(self) -> frozenset[str]:
        """Roles of companions that must be reward models; these skip rows that are too long for them."""
        return frozenset()

    @property
    def has_dropout(self) -> bool:
        """Whether dropout is on in training, as `Needs.dropout` of the objective."""
        return True

    @property
    def stored_temperature(self) -> float | None:
        """Temperature of the `teacher` if an annotate stage may have stored its predictions; None: it may not."""
        return None

    @property
    def reads_layers(self) -> bool:
        """Whether the loss reads tensors inside the model, which only PyTorch hands out."""
        return False

    def files(self) -> Iterable[Path]:
        """Files whose content determines the result."""
        return ()

    @property
    def max_completion_tokens(self) -> int:
        """Length of the longest completion that is sampled after a prompt; 0 if none is sampled."""
        return 0

    @property
    def samples(self) -> int:
        """Completions of each prompt."""
        return 1

    @property
    def passes(self) -> int:
        """How often each step trains on its rows."""
        return 1

    def max_prompt_tokens(self, context: int) -> int:
        """Length of the longest prompt that leaves room for the longest completion.

        Raises:
            UserError: the completion alone fills the context.
        """
        if self.max_completion_tokens >= context:
            raise UserError(
                f"objective.max_new: found {self.max_completion_tokens:,}, expected less than the context of "
                f"{context:,}, which a prompt and its completion share; lower it, or set a longer context"
            )
        return context - self.max_completion_tokens
