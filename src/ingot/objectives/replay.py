"""Replay: rows of running text or conversations that are learned beside another objective's, against forgetting.

A corpus that the objective does not learn from, named in the same `data`, is learned as in pretraining or fine-tuning.
Its share is one of tokens, and each of its targets weighs as much as each target of the other rows. Of those a mask
leaves fewer, so what is replayed of all that is learned is more than its share: `replay_fraction` in the log. Any
objective can be so held to what was learned before, and none knows of it.
"""

from typing import Any

from ingot.data.batches import Batch
from ingot.model.losses import cross_entropy
from ingot.train.objective import Context, Objective, Term


class Replay(Objective):
    """Next-token loss of replayed rows: a penalty beside the objective's loss, and its own mean for the eye."""

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        nll, _ = cross_entropy(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)
        mean = Term(nll.detach(), "replay_token", metric=True)
        return {"replay": Term(nll, "replay", penalty=True), "replay_nats": mean}
