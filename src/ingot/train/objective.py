"""The types an objective meets: it turns (model output, batch) into unnormalised sums, and nothing else.

An objective never sees an optimizer, a rank, a micro-batch or a checkpoint. It returns sums with the unit they count
in; the engine knows how many units the whole step holds, over all micro-batches and ranks, and divides once. That is
why averaging micro-batch means, wrong as soon as their token counts differ, cannot be written here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.execution import Execution


@dataclass(frozen=True)
class Term:
    """One part of a loss: a sum over units, the unit's name (`token`, `sequence`, `pair`) and its weight.

    A penalty is trained on and logged under its own name, and is no part of the reported loss: a validation loss with
    label smoothing in it compares with nothing. A metric is logged the same way and not trained on.
    """

    sum: Tensor
    unit: str
    weight: float = 1.0
    penalty: bool = False
    metric: bool = False


class Mean(NamedTuple):
    """A note that is the mean over only some rows of a batch, such as those that could be scored."""

    value: float
    rows: int


ForwardOf = Callable[[nn.Module], Callable[..., Any]]
"""What to call instead of a model."""


@dataclass(frozen=True)
class Context:
    """What `expand` may use besides the batch: the step, the seed, the model being trained, and frozen companions."""

    step: int
    """From 1; 0 where an evaluation asks, whose draws are thus the same each time."""
    seed: int
    model: nn.Module
    execution: Execution
    companions: Mapping[str, nn.Module] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """What the objective keeps from step to step (its `fresh` at first): plain numbers, saved with a checkpoint."""
    tokenizer: Tokenizer | None = None
    """What the ids are made with; None where a model is trained on ids alone."""
    forward_of: ForwardOf = lambda model: model
    """How a model is run: as training runs it, so that one compared with itself differs by nothing."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Numbers of the whole step by name, written here by the objective and logged beside its loss; a
    `Mean` where not all rows are in it."""

    @property
    def evaluating(self) -> bool:
        """Whether held-out rows are asked about: nothing is kept, and one batch is all that is wanted."""
        return self.step == 0

    def over(self, model: nn.Module, batch: Batch, read: Callable[[Any, Batch], Tensor]) -> Tensor:
        """`read(model's output, rows)`, rows first, for all rows of a batch: as many at once and as training does.

        The model is run as it stands: a companion is in evaluation mode, and the trained model has no dropout where its
        objective compares it with itself.
        """
        found, forward = [], self.forward_of(model)
        for micro in batch.micro(self.execution.rows(batch.context)):
            rows = micro.to(self.execution.device)
            with self.execution.forward():
                found.append(read(forward(**rows.inputs), rows))
        return torch.cat(found)


class Objective:
    """One training method, in one small file: a class that derives from this one and says what is different."""

    taps: frozenset[str] = frozenset()
    """What the forward must also return (hidden states, attention maps); usually nothing."""
    judged_by: Literal["loss_nats", "reward"] = "loss_nats"
    """The held-out number that says which weights are the best: the lowest loss, or the highest reward."""
    dropout: bool = True
    """Whether the model's dropout is on where it has one: not where a method compares the model with itself."""
    speaks: bool = True
    """Whether the model still predicts text, so that a sample of it says something."""
    recordable: bool = False
    """Whether `loss` only puts work on the device: it asks for no number, and all that differs between full batches of
    one shape are their tensors. A GPU then replays updates (`graphs.py`)."""
    overlays: tuple[str, ...] = ()
    """Columns of a row that frozen companions alone decide, and that `annotate` gives."""
    only_annotates: bool = False
    """Whether companions are read for `overlays` alone, so that they may go once those are written."""
    minibatches: int = 1
    """Into how many updates one pass over a step's rows is cut; replayed rows are dealt out over them."""
    fresh: Mapping[str, Any] = {}
    """What `Context.state` holds before the first step: all that the objective may keep there."""

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Further trained modules (value head, projections): saved with the checkpoint, never exported."""
        return {}

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """The columns `overlays` of some rows, (B,) each on the CPU: asked for once before training where every row is
        trained on, and otherwise as rows come."""
        raise NotImplementedError

    def annotated(self, batch: Batch, ctx: Context) -> Batch:
        """The batch with the columns `overlays`, computed where the store does not have them."""
        if all(f"{name}_B" in batch.columns for name in self.overlays):
            return batch
        columns = {f"{name}_B": values for name, values in self.annotate(batch, ctx).items()}
        return replace(batch, columns={**batch.columns, **columns})

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        """Called without gradients on all rows of a step: annotate, roll out, or yield the batch unchanged."""
        yield batch

    def loss(self, out: Any, batch: Batch) -> dict[str, Term]:
        """Named unnormalised terms of the loss of some rows; training and evaluation call the same function."""
        raise NotImplementedError

    def conclude(self, batches: Iterable[Batch], ctx: Context) -> dict[str, float]:
        """Called once, after training and without gradients, on all held-out rows: numbers for the stage's result."""
        return {}

    def frozen(self, model: nn.Module, extra: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        """What another stage gets that names a finished stage of this objective as a companion.

        Args:
            model: the trained model.
            extra: the modules of `modules`, trained.
            result: the numbers of the finished stage.
        """
        return model
