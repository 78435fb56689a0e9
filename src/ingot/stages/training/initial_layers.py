"""`init_layers` of a train stage: a model that starts with some blocks of the model in `init`. No torch.

Embedding, final norm and head are those of the other model, so its width is, too.
"""

from typing import Annotated, Any

from pydantic import Discriminator, NonNegativeInt, PositiveInt, Tag

from ingot.core.errors import UserError
from ingot.model.config import ModelConfig


def _tag(value: Any) -> str:
    return "Numbers" if isinstance(value, list | tuple) else "Count"


InitLayers = Annotated[
    Annotated[PositiveInt, Tag("Count")] | Annotated[tuple[NonNegativeInt, ...], Tag("Numbers")], Discriminator(_tag)
]
"""Numbers of blocks, from 0; or how many, evenly spaced."""


def initial_layers(wanted: int | tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Numbers of the blocks, in order.

    A count takes evenly spaced ones, the first and the last among them (Sanh et al. 2019, arXiv:1910.01108, take every
    second block).

    Args:
        wanted: the setting.
        depth: number of blocks of the model in `init`.

    Raises:
        UserError: a block is not there.
    """
    if isinstance(wanted, int):
        if wanted > depth:
            raise UserError(f"init_layers: found {wanted}, expected at most {depth}, the layers of init; lower it")
        return tuple((2 * i * (depth - 1) + wanted - 1) // max(1, 2 * (wanted - 1)) for i in range(wanted))
    if not wanted or list(wanted) != sorted(set(wanted)):
        raise UserError(f"init_layers: found {list(wanted)}, expected numbers of layers in order, such as [0, 2]")
    if wanted[-1] >= depth:
        raise UserError(f"init_layers: found {wanted[-1]}, expected 0 to {depth - 1}, the layers of init; lower it")
    return wanted


def with_initial_layers(config: ModelConfig, wanted: int | tuple[int, ...] | None) -> ModelConfig:
    """The configuration of a model that starts with some blocks of another one; None: all.

    Raises:
        UserError: a block is not there.
    """
    return config if wanted is None else config.model_copy(update={"depth": len(initial_layers(wanted, config.depth))})
