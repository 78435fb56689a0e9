"""Proximal policy optimisation (Schulman et al. 2017) as it is done for language models (Ziegler et al. 2019).

One trunk with two heads: the model's own for the policy, and a linear one for the value of the state before each token.
The reward of a token is minus beta times its KL estimate from the reference, and the score of the completion on its
last token. Advantages are generalised advantage estimates, whitened over all tokens of the step; the value function
learns returns (advantages before whitening, plus the old values).

    loss = policy + value_weight * value - entropy * entropy (+ beta * KL where it stands in the loss), per token

The value head starts at 0: the first gradients are those of the rewards alone, and no random number is needed.

Rejected: whitening rewards (it rescales beta), normalising advantages in each minibatch (its size would then change the
method), and a score of 0 for completions that could not be scored.

Shapes: B completions, T positions, W width.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.model.losses import token_logps_and_entropies
from ingot.objectives.advantages import adapted, explained_variance, gae, last_positions, token_rewards, whiten
from ingot.objectives.on_policy import Sampled, without
from ingot.objectives.on_policy_settings import PPOSettings
from ingot.objectives.policy import per_row, value_loss
from ingot.objectives.rollout import Rollout
from ingot.train.objective import Context, Term


class ValueHead(nn.Module):
    """Hidden states to values, in the precision of its weights whatever the forward pass is in."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_BTW: Tensor) -> Tensor:
        """[B, T]."""
        with torch.autocast(hidden_BTW.device.type, enabled=False):
            return F.linear(hidden_BTW.to(self.weight.dtype), self.weight, self.bias)[..., 0]


class PPO(Sampled[PPOSettings]):
    """Policy and value function on fresh completions."""

    def initial_state(self) -> dict[str, Any]:
        return {"beta": self.settings.beta} if self.settings.kl_target else {}

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"value": ValueHead(int(model.config.width))}  # pyright: ignore

    def prepared(self, played: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        dropped_B = scores_B.isnan().numpy()
        if self.settings.truncated == "mask":
            dropped_B |= played.truncated_B
        batch = without(played.batch, dropped_B)
        mask_BT = torch.from_numpy(batch.labels_BT != batch.ignore)
        value = ctx.modules["value"]
        both_BT2 = ctx.over(
            ctx.model, batch, lambda out, rows: torch.stack((self.logps(out, rows), value(out.hidden)), -1)
        )
        old_BT, values_BT = both_BT2.cpu().unbind(-1)
        columns = {"old_logps_BT": old_BT, "old_values_BT": values_BT}
        if self.settings.beta:
            columns["reference_logps_BT"] = self.reference_logps(batch, ctx).cpu()
        penalty_BT = self._penalty(columns, mask_BT, ctx)
        scores_B, after_B = self._ends(scores_B.nan_to_num().to(old_BT.dtype), values_BT, mask_BT, played)
        rewards_BT = token_rewards(scores_B, penalty_BT, mask_BT)
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, after_B, self.settings.gamma, self.settings.lam)
        columns["returns_BT"] = returns_BT = advantages_BT + values_BT
        columns["advantages_BT"] = whiten(advantages_BT, mask_BT) if self.settings.whiten else advantages_BT
        explained = float(explained_variance(values_BT, returns_BT, mask_BT))
        if math.isfinite(explained):
            ctx.notes["explained_variance"] = explained
        return replace(batch, columns={**batch.columns, **columns})

    def _penalty(self, columns: Mapping[str, Tensor], mask_BT: Tensor, ctx: Context) -> Tensor:
        """What the KL from the reference costs each token, where it is part of the reward."""
        old_BT, reference_BT = columns["old_logps_BT"], columns.get("reference_logps_BT")
        if reference_BT is None or self.kl.in_loss:
            return torch.zeros_like(old_BT)
        return self._beta(old_BT, reference_BT, mask_BT, ctx) * self.kl.estimate(old_BT, reference_BT)

    def _ends(self, scores_B: Tensor, values_BT: Tensor, mask_BT: Tensor, played: Rollout) -> tuple[Tensor, Tensor]:
        """Scores at the ends of completions, and values of what would come after: 0 but for bootstrapped ones, which
        have no score."""
        if self.settings.truncated != "bootstrap":
            return scores_B, torch.zeros_like(scores_B)
        unfinished_B = torch.from_numpy(played.truncated_B)
        behind_B = (last_positions(mask_BT) + 1).clamp(max=mask_BT.shape[1] - 1)
        after_B = values_BT.gather(1, behind_B[:, None])[:, 0]
        return torch.where(unfinished_B, 0.0, scores_B), torch.where(unfinished_B, after_B, 0.0)

    def _beta(self, old_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, ctx: Context) -> float:
        """The coefficient of this step; where it adapts, the next one's is left in the objective's state."""
        if not self.settings.kl_target:
            return self.settings.beta
        beta = ctx.state["beta"]
        rows = max(1, int(mask_BT.any(1).sum()))
        kl = float(per_row(old_BT - reference_BT, mask_BT).sum()) / rows
        ctx.state["beta"] = adapted(beta, kl, self.settings.kl_target, rows, self.settings.kl_horizon)
        ctx.notes["beta"] = beta
        return beta

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        settings, columns, mask_BT = self.settings, batch.columns, batch.labels_BT != batch.ignore
        if settings.entropy:
            logp_BT, entropy_BT = token_logps_and_entropies(
                out.hidden, out.head, batch.labels_BT, temperature=settings.temperature, ignore=batch.ignore
            )
        else:
            logp_BT, entropy_BT = self.logps(out, batch), None
        terms = self.policy_terms(logp_BT, batch)
        value_BT = value_loss(
            ctx.modules["value"](out.hidden), columns["old_values_BT"], columns["returns_BT"], settings.value_clip
        )
        terms["value"] = Term(per_row(value_BT, mask_BT).sum(), "token", settings.value_weight)
        terms["value_loss"] = Term(terms["value"].sum.detach(), "token", metric=True)
        if entropy_BT is not None:
            terms["entropy"] = Term(-entropy_BT.sum(), "token", settings.entropy)
        return terms
