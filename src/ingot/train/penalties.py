"""Penalties against forgetting, independent of the objective.

There are two kinds. A loss penalty (`KLPenalty`) is computed with the objective's terms from the same forward pass and
divided by the same counts. An anchor (`optim/grad_terms.py`) is a function of the weights and adds its gradient once
per update. Both are logged under their own names and are not part of the reported loss. Clipping includes their
gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.optim.grad_terms import Anchor
from ingot.train.divergences import kl_divergence
from ingot.train.objective import Term


class LossPenalty(Protocol):
    """A penalty that is computed from the forward pass."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        """Named terms with `penalty=True` for some rows."""
        ...


@dataclass(frozen=True)
class KLPenalty:
    """KL(reference || model) of the next-token distributions at all labelled tokens, over the full vocabulary.

    This direction is the cross-entropy with the reference's predictions minus their entropy, as in learning without
    forgetting (Li and Hoiem 2016, arXiv:1606.09282).
    """

    name: str
    weight: float
    reference: nn.Module
    """A frozen model with the Transformer's forward."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        with torch.no_grad():
            reference = self.reference(**batch.inputs)
        kl_BT = kl_divergence(
            out.hidden, out.head, reference.hidden, reference.head, batch.labels_BT, ignore=batch.ignore
        )
        return {self.name: Term(kl_BT.sum(), "token", self.weight, penalty=True)}


@dataclass(frozen=True)
class Penalties:
    """All penalties of a stage."""

    losses: Sequence[LossPenalty] = ()
    anchors: Sequence[Anchor] = ()
    weights: Callable[[], Mapping[str, Tensor]] = dict
    """Returns the weights that the model computes with, by name, for the anchors."""

    def terms(self, out: Any, batch: Batch) -> dict[str, Term]:
        """The terms of all loss penalties."""
        return {n: term for penalty in self.losses for n, term in penalty.terms(out, batch).items()}

    def add_gradients(self, sum_of_shards: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
        """Add the gradients of all anchors to `.grad`. Returns their values and gradient norms by name.

        Args:
            sum_of_shards: sums a tensor over the ranks that hold the parts of one model.
        """
        weights = self.weights() if self.anchors else {}
        found = (anchor.add_gradients(weights, sum_of_shards) for anchor in self.anchors)
        return {name: value for values in found for name, value in values.items()}

    def on_parts(self, weights: Mapping[str, Tensor], cut: Callable[[Tensor, Tensor], Tensor]) -> "Penalties":
        """The penalties of a model of which this rank has parts.

        Args:
            weights: the parts by parameter name.
            cut: (a whole tensor, this rank's part of a parameter) -> this rank's part of the tensor.
        """

        def parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: cut(tensor, weights[name]).clone() for name, tensor in tensors.items() if name in weights}

        anchors = [
            replace(a, center=parts(a.center), importance=a.importance and parts(a.importance)) for a in self.anchors
        ]
        return Penalties(self.losses, anchors, lambda: weights)
