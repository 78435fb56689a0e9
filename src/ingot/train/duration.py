"""`"3M tokens"`, `"5000 steps"`, `"1 epoch"`, `"20 tokens/param"`: how long a run is."""

import re
from dataclasses import dataclass

from ingot.core.errors import UserError

_FORM = re.compile(
    r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMBT]?)\s*(steps?|tokens?/param(?:eter)?|tokens?|epochs?)"
)
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST = 1e18
"""Steps beyond which a 64-bit number ends."""
EXPECTED = "expected a number and a unit: '5000 steps', '3M tokens', '1 epoch' or '20 tokens/param'"


@dataclass(frozen=True)
class Duration:
    """An amount of `steps`, `tokens`, `epochs` or `tokens/param`."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Read the recipe's form.

        Raises:
            ValueError: what was expected instead.
        """
        match = _FORM.fullmatch(text.strip())
        if not match:
            raise ValueError(f"found {text!r}, {EXPECTED}")
        number, scale, unit = match.groups()
        amount = float(re.sub("[_,]", "", number)) * _SCALE[scale]
        if not 0 < amount <= _MOST:
            raise ValueError(f"found {text!r}, expected more than nothing and at most {_MOST:.0e}")
        unit = "tokens/param" if "/" in unit else unit.rstrip("s") + "s"
        return cls(amount, unit)

    def tokens(self, epoch: float | None, parameters: int) -> float:
        """The amount in tokens (targets), where it is not in steps.

        Args:
            epoch: targets in one pass over the mixture; None where that is not known yet.
            parameters: trained parameters of the model, embeddings included.

        Raises:
            UserError: it is in epochs, and nobody knows how long one is.
        """
        assert self.unit != "steps"
        if self.unit == "epochs" and epoch is None:
            raise UserError("the length of an epoch is known once the texts are encoded")
        return self.amount * {"tokens": 1, "epochs": epoch or 0, "tokens/param": parameters}[self.unit]
