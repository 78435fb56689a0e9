"""The types of an objective: it turns (model output, batch, context) into unnormalised sums, and nothing else.

An objective never sees an optimizer, a rank, a micro-batch or a checkpoint. It returns sums with their units; the
engine knows how many units the step holds over all micro-batches and ranks, and divides once. Averaging micro-batch
means, which is wrong as soon as their token counts differ, cannot be written here.

Shapes: B rows, T positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.execution import Execution


@dataclass(frozen=True)
class Term:
    """One part of a loss: a sum over units.

    A penalty is trained on and logged under its own name, and is not part of the reported loss: a validation loss with
    label smoothing in it compares with nothing. A metric is logged the same way and not trained on.
    """

    sum: Tensor
    unit: str
    """`token`, `sequence`, `pair`, or another count of `Batch.counts`."""
    weight: float = 1.0
    penalty: bool = False
    metric: bool = False


class Mean(NamedTuple):
    """A note that is the mean over only some rows of a batch, such as those that could be scored."""

    value: float
    rows: int


@dataclass(frozen=True)
class Column:
    """Values that frozen companions compute of each row, stored beside the data and read with the batch.

    A column per document reaches the batch as `NAME_B`. A column per token belongs to the token that is predicted, so
    it reaches the batch as `NAME_BT`, aligned with the labels, and is 0 where there is no label.
    """

    name: str
    per: Literal["document", "token"] = "document"
    dtype: str = "<f8"
    """A little-endian numpy type."""
    width: int = 1
    """Values of a document or token; more than 1 add a dimension."""

    @property
    def key(self) -> str:
        """Its name among a batch's columns."""
        return f"{self.name}_B" if self.per == "document" else f"{self.name}_BT"


@dataclass(frozen=True)
class Needs:
    """What an objective asks of the engine, besides rows and a model."""

    taps: frozenset[str] = frozenset()
    """What the forward pass must also return (hidden states, attention probabilities)."""
    columns: tuple[Column, ...] = ()
    """What `annotate` computes of each row: before training where the run will see every row, else as rows come."""
    companions_after_annotate: bool = True
    """Whether companions are read by more than `annotate`; if not they are freed once columns are written."""
    dropout: bool = True
    """Whether the model's dropout is on in training. Methods that compare the model with itself turn it off."""
    best_metric: str = "loss_nats"
    """The held-out number that decides which weights are the best."""
    higher_is_better: bool = False
    """Of `best_metric`."""
    updates_per_pass: int = 1
    """Updates that one pass over a step's rows is cut into; replayed rows are split over them."""
    generates_text: bool = True
    """Whether the trained model still predicts text, so that a sample of it is meaningful."""
    samples: bool = False
    """Whether the rows that are learned are sampled from the model in each step."""
    capturable: bool = False
    """Whether `loss` only enqueues work on the device: it reads no number back, and full batches of one shape differ in
    their tensors alone. A GPU may then replay whole updates."""
    initial_state: Mapping[str, Any] = field(default_factory=dict)
    """`Context.state` before the first step: plain numbers, and all that the objective may keep there."""


class Reader(Protocol):
    """Runs any model over rows as training would (`train/runner.py`)."""

    def read(
        self,
        model: nn.Module,
        batch: Batch,
        read: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor: ...


@dataclass(frozen=True)
class Context:
    """What an objective may use besides a batch."""

    step: int
    """From 1; 0 in an evaluation, whose draws are thus the same each time."""
    seed: int
    model: nn.Module
    execution: Execution
    reader: Reader
    companions: Mapping[str, nn.Module] = field(default_factory=dict)
    """Frozen models by role."""
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """What the objective's `modules` returned, as it is trained."""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept from step to step and saved with checkpoints; see `Needs.initial_state`."""
    tokenizer: Tokenizer | None = None
    """None where a model is trained on ids alone."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Numbers of the step by name, written by the objective and logged beside its loss; a `Mean` where not all rows
    count."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """The sum of a tensor over all ranks that hold different rows."""

    @property
    def evaluating(self) -> bool:
        """Whether held-out rows are evaluated: state is not kept, and one batch is expected of `expand`."""
        return self.step == 0

    def over(
        self,
        model: nn.Module,
        batch: Batch,
        read: Callable[[Any, Batch], Tensor],
        taps: frozenset[str] = frozenset(),
    ) -> Tensor:
        """`read(model's output, rows)` for all rows of a batch, rows first, a micro-batch at a time as in training.

        The model runs in the mode it is in: companions are in evaluation mode, and the trained model has no dropout
        where its objective compares it with itself.
        """
        return self.reader.read(model, batch, read, taps)


class Objective:
    """One training method. A subclass in one file overrides what differs."""

    needs = Needs()

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Further trained modules (value head, projections), new: saved with checkpoints, never exported."""
        return {}

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """The columns of `Needs.columns` by name, on the CPU: (B,) or (B, T), times their width. No gradients."""
        raise NotImplementedError

    def annotated(self, batch: Batch, ctx: Context) -> Batch:
        """The batch with its columns, computed where the data do not have them."""
        if all(column.key in batch.columns for column in self.needs.columns):
            return batch
        values = self.annotate(batch, ctx)
        columns = {column.key: values[column.name] for column in self.needs.columns}
        return replace(batch, columns={**batch.columns, **columns})

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        """The batches of a step's updates, from all its rows: annotated, sampled, or unchanged. No gradients."""
        yield self.annotated(batch, ctx)

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        """Named unnormalised terms of some rows; training and evaluation call the same function."""
        raise NotImplementedError

    def conclude(self, batches: Iterable[Batch], ctx: Context) -> dict[str, float]:
        """Numbers for the stage's result, from all held-out rows, once after training. No gradients."""
        return {}

    def companion(self, model: nn.Module, modules: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        """The frozen model that other stages get when they name a finished stage of this objective.

        Args:
            model: the trained model.
            modules: what `modules` returned, trained.
            result: the numbers of the finished stage.
        """
        return model


def no_grad_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches of an `expand`, whose code runs without gradients each time the next batch is asked for."""
    while True:
        with torch.no_grad():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
