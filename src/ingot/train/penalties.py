"""Penalties on a training step that no objective knows: what keeps an old task while a new one is learned.

There are two kinds. A term of the loss (`Divergence`) is computed beside the objective's terms from the same forward
pass and divided by the same counts; an anchor (`optim/grad_terms.py`) is a function of the weights and adds its
gradient once a step. Both are logged under their own names and are not part of the reported loss; the global norm is
clipped with them in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.model.losses import kl_divergence
from ingot.optim.grad_terms import Anchor
from ingot.train.objective import Term


class LossPenalty(Protocol):
    """Terms beside those of the objective."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        """Named terms with `penalty=True`, from the forward pass of some rows."""
        ...


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) of each labelled token given the ones before, over the full vocabulary.

    In this direction it is the cross-entropy on the reference's own predictions less their entropy: learning without
    forgetting (Li and Hoiem 2016, arXiv:1606.09282), distillation from the model as it was.
    """

    name: str
    weight: float
    reference: nn.Module
    """A frozen model with the Transformer's forward."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        with torch.no_grad():
            old = self.reference(**batch.inputs)
        kl_BT = kl_divergence(out.hidden, out.head, old.hidden, old.head, batch.labels_BT, ignore=batch.ignore)
        return {self.name: Term(kl_BT.sum(), "token", self.weight, penalty=True)}


@dataclass(frozen=True)
class Penalties:
    """All penalties of a stage."""

    losses: Sequence[LossPenalty] = ()
    anchors: Sequence[Anchor] = ()
    weights: Callable[[], Mapping[str, Tensor]] = dict
    """The weights that the model computes with, by name, which anchors hold."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        """The terms of all that are part of the loss."""
        return {n: term for penalty in self.losses for n, term in penalty.terms(out, batch).items()}

    def pull(self) -> dict[str, Tensor]:
        """Add the gradients of all anchors to `.grad`; their values and norms, by name."""
        weights = self.weights() if self.anchors else {}
        return {name: value for anchor in self.anchors for name, value in anchor.pull(weights).items()}
