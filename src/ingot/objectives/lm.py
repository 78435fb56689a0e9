"""Next-token prediction: pretraining and supervised fine-tuning are the same loss over different labels.

The negative log-likelihood summed over all labelled targets (Bengio et al. 2003, eq. 1 of any language-model paper).
Fine-tuning on responses is not another objective: the store's mask column decides which targets have labels.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ingot.data.batches import IGNORE, Batch
from ingot.model.ops import cross_entropy
from ingot.train.api import Context, Term


class LanguageModel:
    """Cross-entropy over every labelled position."""

    taps: frozenset[str] = frozenset()

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return {}

    def companions(self) -> dict[str, str]:
        return {}

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        yield batch

    def loss(self, out: Any, batch: Batch) -> dict[str, Term]:
        nll, _ = cross_entropy(out.hidden, out.head, batch.labels_BT, ignore=IGNORE)
        return {"lm": Term(nll, "token")}
