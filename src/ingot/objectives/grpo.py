"""Policy gradients with a group of samples as baseline: GRPO, RLOO, Dr. GRPO and GSPO, selected by settings.

Every prompt is completed several times. The advantage of a completion is its reward minus a baseline of its group
(Shao et al. 2024, arXiv:2402.03300); there is no value function. With one update a step the ratios are 1 and the loss
is about 0 whatever the policy learns: watch `reward` instead, or `weighted_logp`.

A KL penalty in the reward is summed from each token to the end of the completion and subtracted from the token's
advantage. A KL penalty in the loss is a second term with the same aggregation.

Shapes: B completions, P prompts, G samples of a prompt, T positions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ingot.data.batches import Batch
from ingot.objectives.advantages import group_advantages, sum_to_end
from ingot.objectives.on_policy import OnPolicyObjective
from ingot.objectives.on_policy_settings import GRPOSettings
from ingot.objectives.rollout import Rollout
from ingot.train.objective import Context, Term


class GRPO(OnPolicyObjective[GRPOSettings]):
    """Policy gradients within groups."""

    def __init__(self, settings: GRPOSettings):
        super().__init__(settings)
        self.aggregation = settings.aggregation
        self.per_sequence = settings.ratio == "sequence"

    def training_batch(self, rollout: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        scores_PG = scores_B.view(-1, self.samples)
        advantages_PG = group_advantages(scores_PG, self.settings.baseline, self.settings.standardise)
        ctx.metrics["groups_without_signal"] = float((advantages_PG.abs().amax(1) < 1e-6).float().mean())
        dropped_B = torch.isnan(scores_B).numpy()
        if self.settings.truncated == "mask":
            dropped_B |= rollout.truncated_B
        batch = rollout.batch.without_labels(dropped_B)
        mask_BT = torch.from_numpy(batch.labels_BT != batch.ignore)
        advantages_BT = torch.where(mask_BT, advantages_PG.view(-1, 1), 0.0)
        columns: dict[str, Tensor] = {}
        kl_in_reward = self.settings.beta > 0 and not self.kl.in_loss
        if self.settings.beta:
            columns["reference_logps_BT"] = self.reference_logps(batch, ctx).cpu()
        if kl_in_reward or self.settings.epochs * self.minibatches > 1:  # a single update computes them in its loss
            columns["old_logps_BT"] = ctx.over(ctx.model, batch, self.logps).cpu()
        if kl_in_reward:
            kl_BT = self.kl.estimate(columns["old_logps_BT"], columns["reference_logps_BT"])
            advantages_BT = advantages_BT - self.settings.beta * sum_to_end(kl_BT, mask_BT)
        return replace(batch, columns={**batch.columns, **columns, "advantages_BT": advantages_BT})

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        return self.policy_terms(self.logps(out, batch), batch)
