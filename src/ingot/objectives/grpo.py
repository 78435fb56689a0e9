"""Policy gradients with a group of samples as its own baseline: GRPO, RLOO, Dr. GRPO, GSPO by settings.

Every prompt is completed several times, and a completion's advantage is its reward above the others' (Shao et al. 2024,
arXiv:2402.03300); there is no value function. With one update a step the ratios are 1 and the loss is about 0 whatever
the policy learns: watch `reward`, and `weighted_logp` if something is to be watched in the loss.

A KL penalty in the reward is added to each token's advantage as the sum over the tokens from it on; in the loss it is a
term beside the policy's, of the same aggregation.

Shapes: B completions, P prompts, G samples of a prompt, T positions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ingot.data.batches import Batch
from ingot.objectives.advantages import group_advantages, to_go
from ingot.objectives.on_policy import Sampled, without
from ingot.objectives.on_policy_settings import GRPOSettings
from ingot.objectives.rollout import Rollout
from ingot.train.objective import Context, Term


class GRPO(Sampled[GRPOSettings]):
    """Policy gradients within groups."""

    def __init__(self, settings: GRPOSettings):
        super().__init__(settings)
        self.aggregation = settings.aggregation
        self.whole_sequences = settings.ratio == "sequence"

    def prepared(self, played: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        scores_PG = scores_B.view(-1, self.samples)
        advantages_PG = group_advantages(scores_PG, self.settings.baseline, self.settings.standardise)
        ctx.notes["groups_without_signal"] = float((advantages_PG.abs().amax(1) < 1e-6).float().mean())
        dropped_B = torch.isnan(scores_B).numpy()
        if self.settings.truncated == "mask":
            dropped_B |= played.truncated_B
        batch = without(played.batch, dropped_B)
        mask_BT = torch.from_numpy(batch.labels_BT != batch.ignore)
        advantages_BT = torch.where(mask_BT, advantages_PG.view(-1, 1), 0.0)
        columns: dict[str, Tensor] = {}
        penalised = self.settings.beta > 0 and not self.kl.in_loss
        if self.settings.beta:
            columns["reference_logps_BT"] = self.reference_logps(batch, ctx).cpu()
        if penalised or self.settings.epochs * self.minibatches > 1:  # else the loss of the one update has them itself
            columns["old_logps_BT"] = ctx.over(ctx.model, batch, self.logps).cpu()
        if penalised:
            kl_BT = self.kl.estimate(columns["old_logps_BT"], columns["reference_logps_BT"])
            advantages_BT = advantages_BT - self.settings.beta * to_go(kl_BT, mask_BT)
        return replace(batch, columns={**batch.columns, **columns, "advantages_BT": advantages_BT})

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        return self.policy_terms(self.logps(out, batch), batch)
