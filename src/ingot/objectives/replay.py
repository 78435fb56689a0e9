"""Replay: next-token loss on text or conversations beside another objective's loss, against forgetting.

A corpus in `data` whose format the objective does not read is replayed: trained on as in pretraining or fine-tuning.
Its weight in `data` is a fraction of tokens. Each replayed target weighs as much as a target of the other rows; masks
remove targets from those, so the replayed fraction of targets is larger. It is logged as `replay_fraction`.

Replay works with every objective, and no objective refers to it.
"""

from typing import Any

from ingot.data.batches import Batch
from ingot.model.losses import cross_entropy
from ingot.train.objective import Context, Objective, Term


class Replay(Objective):
    """Next-token loss of replayed rows, as a penalty; the metric `replay_nats` is its mean per replayed token."""

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        nll, _ = cross_entropy(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)
        mean = Term(nll.detach(), "replay_token", metric=True)
        return {"replay": Term(nll, "replay", penalty=True), "replay_nats": mean}
