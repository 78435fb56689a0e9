"""The length of a run: "3M tokens", "5000 steps", "1 epoch" or "20 tokens/param"."""

import re
from dataclasses import dataclass

from ingot.core.errors import UserError

_FORM = re.compile(
    r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMBT]?)\s*(steps?|tokens?/param(?:eter)?|tokens?|epochs?)"
)
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_AMOUNT = 1e18
"""Counts of tokens must fit 64-bit integers."""
EXPECTED = "expected a number and a unit: '5000 steps', '3M tokens', '1 epoch' or '20 tokens/param'"


@dataclass(frozen=True)
class Duration:
    """An amount of `steps`, `tokens`, `epochs` or `tokens/param`."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Parse the form of recipes.

        Raises:
            ValueError: the text has another form, or the amount is out of range.
        """
        match = _FORM.fullmatch(text.strip())
        if not match:
            raise ValueError(f"found {text!r}, {EXPECTED}")
        number, scale, unit = match.groups()
        amount = float(re.sub("[_,]", "", number)) * _SCALE[scale]
        if not 0 < amount <= _MAX_AMOUNT:
            raise ValueError(f"found {text!r}, expected more than 0 and at most {_MAX_AMOUNT:.0e}")
        unit = "tokens/param" if "/" in unit else unit.rstrip("s") + "s"
        return cls(amount, unit)

    def tokens(self, epoch: float | None, parameters: int) -> float:
        """The amount in tokens (predicted ones). The unit must not be steps.

        Args:
            epoch: predicted tokens of one pass over the mixture; None if not known yet.
            parameters: trained parameters of the model, embeddings included.

        Raises:
            UserError: the unit is epochs, and their length is not known yet.
        """
        assert self.unit != "steps"
        if self.unit == "epochs" and epoch is None:
            raise UserError("the length of an epoch is known once the texts are encoded")
        return self.amount * {"tokens": 1, "epochs": epoch or 0, "tokens/param": parameters}[self.unit]
