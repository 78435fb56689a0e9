"""What the rest of the house asks the settings of an objective for. No torch."""

from collections.abc import Iterable
from pathlib import Path

from ingot.core.errors import UserError
from ingot.core.settings import Settings


class MethodSettings(Settings):
    """Settings of an objective; a kind overrides what is otherwise with it."""

    def companions(self) -> dict[str, str | None]:
        """Role -> stage of each frozen model that it compares with; None is the stage's `init`."""
        return {}

    @property
    def scoring_roles(self) -> frozenset[str]:
        """Roles of companions that must be reward models. These leave out rows that they cannot read."""
        return frozenset()

    def files(self) -> Iterable[Path]:
        """Files whose content determines the result."""
        return ()

    @property
    def completion(self) -> int:
        """Tokens of the longest completion that is sampled behind a prompt."""
        return 0

    @property
    def samples(self) -> int:
        """Completions of each prompt."""
        return 1

    @property
    def passes(self) -> int:
        """How often the rows of a step are trained on."""
        return 1

    def room_for_prompts(self, context: int) -> int:
        """Tokens of a row that a prompt may fill: the longest completion has to follow it.

        Raises:
            UserError: the completion leaves a prompt no token.
        """
        if self.completion >= context:
            raise UserError(
                f"objective.max_new: found {self.completion:,}, expected less than the context of {context:,}, which a "
                "prompt and its completion share; lower it, or set a longer context"
            )
        return context - self.completion
