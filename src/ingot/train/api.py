"""The types an objective meets: it turns (model output, batch) into unnormalised sums, and nothing else.

An objective never sees an optimizer, a rank, a micro-batch or a checkpoint. It returns sums with the unit they count
in; the engine knows how many units the whole step holds, over all micro-batches and ranks, and divides once. That is
why averaging micro-batch means, wrong as soon as their token counts differ, cannot be written here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ingot.data.batches import Batch


@dataclass(frozen=True)
class Term:
    """One part of a loss: a sum over units, the unit's name (`token`, `sequence`, `pair`) and its weight.

    A penalty is trained on and logged under its own name, and is no part of the reported loss: a validation loss with
    label smoothing in it compares with nothing.
    """

    sum: Tensor
    unit: str
    weight: float = 1.0
    penalty: bool = False


@dataclass(frozen=True)
class Context:
    """What `expand` may use besides the batch: the step, the seed, the model being trained, and frozen companions."""

    step: int
    seed: int
    model: nn.Module
    companions: Mapping[str, nn.Module] = field(default_factory=dict)


class Objective(Protocol):
    """One training method, in one small file: a class that derives from this one and says what is different."""

    taps: frozenset[str] = frozenset()
    """What the forward must also return (hidden states, attention maps); usually nothing."""

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Further trained modules (value head, projections): saved with the checkpoint, never exported."""
        return {}

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        """Called without gradients on all rows of a step: annotate, roll out, or yield the batch unchanged."""
        yield batch

    def loss(self, out: Any, batch: Batch) -> dict[str, Term]:
        """Named unnormalised terms of the loss of some rows; training and evaluation call the same function."""
        ...

    def frozen(self, model: nn.Module, extra: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        """What another stage gets that names a finished stage of this objective as a companion.

        Args:
            model: the trained model.
            extra: the modules of `modules`, trained.
            result: the numbers of the finished stage.
        """
        return model
