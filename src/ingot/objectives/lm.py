"""Next-token prediction: pretraining and supervised fine-tuning use the same loss with different labels.

The loss is the negative log-likelihood summed over all labelled targets (Bengio et al. 2003). Fine-tuning on responses
needs no objective of its own: the store's mask column decides which targets have labels.

Label smoothing and the z-loss are penalties and never part of the reported loss. With smoothing e the target is
(1 - e) label + e uniform, so the smoothed loss is nll + e (uniform - nll) and the penalty is its second term.
"""

from typing import Any

from ingot.data.batches import Batch
from ingot.model.losses import cross_entropy, cross_entropy_terms
from ingot.objectives.settings import LanguageModelSettings
from ingot.train.objective import Context, Needs, Objective, Term


class LanguageModel(Objective):
    """Cross-entropy over every labelled position."""

    needs = Needs(loss_is_nll=True, capturable=True)

    def __init__(self, settings: LanguageModelSettings | None = None):
        settings = settings or LanguageModelSettings()
        self.label_smoothing, self.z_loss = settings.label_smoothing, settings.z_loss

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        if not (self.label_smoothing or self.z_loss):
            nll, _ = cross_entropy(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)
            return {"lm": Term(nll, "token")}
        nll, uniform, z_squared = cross_entropy_terms(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)
        terms = {"lm": Term(nll, "token")}
        if self.label_smoothing:
            terms["label_smoothing"] = Term(uniform - nll, "token", self.label_smoothing, penalty=True)
        if self.z_loss:
            terms["z_loss"] = Term(z_squared, "token", self.z_loss, penalty=True)
        return terms
