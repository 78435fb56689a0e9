"""Next-token prediction: pretraining and supervised fine-tuning are the same loss over different labels.

The negative log-likelihood summed over all labelled targets (Bengio et al. 2003, eq. 1 of any language-model paper).
Fine-tuning on responses is not another objective: the store's mask column decides which targets have labels.

Label smoothing and the z-loss are penalties beside it, never part of the reported loss: with smoothing e the target is
(1 - e) of the label and e of the uniform distribution, and that loss is -ln p(label) + e (uniform part - -ln p(label)).
"""

from typing import Any

from ingot.data.batches import Batch
from ingot.model.losses import cross_entropy, cross_entropy_terms
from ingot.objectives.settings import LanguageModelSettings
from ingot.train.objective import Context, Needs, Objective, Term


class LanguageModel(Objective):
    """Cross-entropy over every labelled position."""

    needs = Needs(capturable=True)

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
