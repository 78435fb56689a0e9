"""The interface of an objective, which turns (model output, batch, context) into unnormalised sums.

An objective never sees an optimizer, a rank, a micro-batch or a checkpoint. It returns sums with their units. The
engine counts the units of the step over all micro-batches and ranks, and divides once. So an objective cannot average
micro-batch means, which is wrong whenever their token counts differ.

Shapes: B rows, T positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.execution import Execution

T = TypeVar("T")


@dataclass(frozen=True)
class Term:
    """One term of a loss: a sum over units.

    A penalty is trained on and logged under its own name, but is not part of the reported loss, so that a validation
    loss stays comparable between runs with and without, say, label smoothing. A metric is logged the same way and not
    trained on.
    """

    sum: Tensor
    unit: str
    """`token`, `sequence`, `pair`, or another key of `Batch.counts`."""
    weight: float = 1.0
    penalty: bool = False
    metric: bool = False


class Mean(NamedTuple):
    """A metric that is the mean over some rows of a batch only, such as those that could be scored."""

    value: float
    rows: int
    each: tuple[float, ...] = ()
    """The values of these rows, if evaluations are compared row by row."""


@dataclass(frozen=True)
class Column:
    """Values that frozen companions compute for each row, stored next to the data and read with the batch.

    `Batch.columns` has a column per document as `NAME_B`. A column per token belongs to the predicted token; it appears
    as `NAME_BT`, aligned with the labels, and is 0 where there is no label.
    """

    name: str
    per: Literal["document", "token"] = "document"
    dtype: str = "<f8"
    """A little-endian numpy type."""
    width: int = 1
    """Values per document or token; more than 1 add a dimension."""

    @property
    def key(self) -> str:
        """The column's key in `Batch.columns`."""
        return f"{self.name}_B" if self.per == "document" else f"{self.name}_BT"


@dataclass(frozen=True)
class Needs:
    """What an objective requires of the engine, besides rows and a model."""

    taps: frozenset[str] = frozenset()
    """Intermediate tensors that the forward pass must return (`Transformer.forward`)."""
    columns: tuple[Column, ...] = ()
    """What `annotate` computes for each row: before training if the run uses every row, else batch by batch."""
    companions_after_annotate: bool = True
    """Whether companions are used outside `annotate`; if not, they are freed once the columns are written."""
    dropout: bool = True
    """Whether the model's dropout is on in training. Methods that compare the model with itself turn it off."""
    best_metric: str = "loss_nats"
    """The validation metric that selects the best weights."""
    higher_is_better: bool = False
    """The direction of `best_metric`."""
    updates_per_pass: int = 1
    """Number of updates per pass over a step's rows; replayed rows are split over them."""
    generates_text: bool = True
    """Whether the trained model still predicts text, so that sampling from it makes sense."""
    samples: bool = False
    """Whether each step trains on rows sampled from the model."""
    whole_step: bool = False
    """Whether `expand` needs all rows of a step at once; else it may get some of them at a time."""
    loss_is_nll: bool = False
    """Whether the reported loss is the negative log-likelihood of the labels, so that bits per byte follow from it."""
    capturable: bool = False
    """Whether a CUDA graph may capture `loss`: it reads nothing back from the device, and full batches of the same
    shape differ only in their tensors. Complete updates are then replayed."""
    initial_state: Mapping[str, Any] = field(default_factory=dict)
    """`Context.state` before the first step: plain numbers. It declares all keys of the state."""


class ForwardRunner(Protocol):
    """Runs any model over rows as training does (`train/runner.py`)."""

    def run(
        self,
        model: nn.Module,
        batch: Batch,
        function: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor: ...

    def map(self, function: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]) -> list[T]: ...

    def once(self, function: Callable[[], T]) -> T: ...

    def readable(self, model: nn.Module) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Context:
    """What an objective may use besides a batch."""

    step: int
    """From 1; 0 in evaluations, so that their random numbers are the same each time."""
    seed: int
    model: nn.Module
    execution: Execution
    runner: ForwardRunner
    companions: Mapping[str, nn.Module] = field(default_factory=dict)
    """Frozen models by role."""
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """The trained modules that the objective's `modules` returned."""
    state: dict[str, Any] = field(default_factory=dict)
    """Persists from step to step and is saved with checkpoints; see `Needs.initial_state`."""
    tokenizer: Tokenizer | None = None
    """None if a model is trained on ids alone."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Numbers of the step by name. The objective writes them and the engine logs them with the loss. A `Mean` covers
    some of the rows only."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Sums a tensor over all ranks that hold different rows."""

    @property
    def evaluating(self) -> bool:
        """Whether this is an evaluation: state is not stored, and `expand` must yield one batch."""
        return self.step == 0

    def over(
        self,
        model: nn.Module,
        batch: Batch,
        function: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Run a model over a batch in micro-batches, as training does: `function(output, rows)`, concatenated.

        The model stays in its mode. Companions are in eval mode; the trained model is in train mode unless
        `Needs.dropout` is off.

        Args:
            function: (model output, rows of a micro-batch) to a tensor with the rows as first dimension.
        """
        return self.runner.run(model, batch, function, taps)

    def map(self, function: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]) -> list[T]:
        """`function(items)`, which returns one result an item; several processes may each compute some of them."""
        return self.runner.map(function, items)

    def once(self, function: Callable[[], T]) -> T:
        """`function()`, called by one process: for code of the user, which may have files or a state."""
        return self.runner.once(function)

    def readable(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which all weights of a model can be read, to sample from it."""
        return self.runner.readable(model)


class Objective:
    """Base class of training methods. A subclass overrides what differs from next-token training."""

    needs = Needs()

    def for_models(self, model: nn.Module, companions: Mapping[str, nn.Module]) -> "Objective":
        """This objective for these models, called once before all else.

        Where taps or modules depend on the shapes of models: an objective that knows them.
        """
        return self

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Additional modules to train (value head, projections): new ones, saved with checkpoints, never exported."""
        return {}

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """The values of `Needs.columns` by name, on the CPU: (B,) or (B, T), times the width. No gradients."""
        raise NotImplementedError

    def annotated(self, batch: Batch, ctx: Context) -> Batch:
        """The batch with all `Needs.columns`, computed if the data do not have them."""
        if all(column.key in batch.columns for column in self.needs.columns):
            return batch
        values = self.annotate(batch, ctx)
        columns = {column.key: _at_labels(values[column.name], column, batch) for column in self.needs.columns}
        return replace(batch, columns={**batch.columns, **columns})

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        """Yield the batch of each update of a step, from all rows of the step. Runs without gradients."""
        yield self.annotated(batch, ctx)

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        """Named unnormalised terms of some rows. Training and evaluation call the same function."""
        raise NotImplementedError

    def final_metrics(self, batches: Iterable[Batch], ctx: Context) -> dict[str, float]:
        """Additional metrics of the stage's result, computed once after training from all validation rows.

        Runs without gradients.
        """
        return {}

    def companion(self, model: nn.Module, modules: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        """The frozen model that other stages get when they refer to a finished stage of this objective.

        Args:
            model: the trained model.
            modules: the trained modules of `modules`.
            result: the result of the finished stage.
        """
        return model


def _at_labels(values: Tensor, column: Column, batch: Batch) -> Tensor:
    """Values of tokens, 0 without a label as in columns of a store; other values unchanged."""
    if column.per == "document":
        return values
    labelled_BT = torch.as_tensor(batch.labels_BT != batch.ignore, device=values.device)
    return values.masked_fill(~labelled_BT.view(*labelled_BT.shape, *[1] * (values.ndim - 2)), 0)


def no_grad_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Iterate over the batches of an `expand` generator with gradients disabled inside the generator only."""
    while True:
        with torch.no_grad():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
