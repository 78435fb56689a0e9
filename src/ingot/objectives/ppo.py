"""Proximal policy optimisation (Schulman et al. 2017) for language models (Ziegler et al. 2019).

The policy and the value function share one trunk: the model's own head gives the policy, and a linear head the value
of the state before each token. The reward of a token is -beta times its KL estimate from the reference; the last token
of a completion also gets the completion's score. Advantages are generalised advantage estimates, whitened over all
tokens of the step. The value function learns returns (unwhitened advantages plus the old values).

    loss = policy + value_weight * value - entropy * entropy (+ beta * KL if `kl` is a term of the loss), per token

The value head is initialised to 0, so it needs no random numbers and does not bias the first advantages.

Rewards are not whitened, which would rescale beta. Advantages are not normalised per minibatch, whose size would then
change the method.

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
from ingot.objectives.advantages import adapt_beta, explained_variance, gae, last_positions, token_rewards, whiten
from ingot.objectives.on_policy import OnPolicyObjective
from ingot.objectives.on_policy_settings import PPOSettings
from ingot.objectives.policy import per_row, value_loss
from ingot.objectives.rollout import Rollout
from ingot.train.objective import Context, Term


class ValueHead(nn.Module):
    """Linear map of hidden states to values, computed in the precision of its weights even under autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_BTW: Tensor) -> Tensor:
        """[B, T]."""
        with torch.autocast(hidden_BTW.device.type, enabled=False):
            return F.linear(hidden_BTW.to(self.weight.dtype), self.weight, self.bias)[..., 0]


class PPO(OnPolicyObjective[PPOSettings]):
    """Clipped policy and value losses on the policy's own completions."""

    def initial_state(self) -> dict[str, Any]:
        return {"beta": self.settings.beta} if self.settings.kl_target else {}

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"value": ValueHead(int(model.config.width))}  # pyright: ignore

    def training_batch(self, rollout: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        dropped_B = scores_B.isnan().numpy()
        if self.settings.truncated == "mask":
            dropped_B |= rollout.truncated_B
        batch = rollout.batch.without_labels(dropped_B)
        mask_BT = torch.from_numpy(batch.labels_BT != batch.ignore)
        value = ctx.modules["value"]
        logps_and_values_BT2 = ctx.over(
            ctx.model, batch, lambda out, rows: torch.stack((self.logps(out, rows), value(out.hidden)), -1)
        )
        old_BT, values_BT = logps_and_values_BT2.cpu().unbind(-1)
        columns = {"old_logps_BT": old_BT, "old_values_BT": values_BT}
        if self.settings.beta:
            columns["reference_logps_BT"] = self.reference_logps(batch, ctx).cpu()
        penalty_BT = self._penalty(columns, mask_BT, ctx)
        scores_B, after_B = self._final(scores_B.nan_to_num().to(old_BT.dtype), values_BT, mask_BT, rollout)
        rewards_BT = token_rewards(scores_B, penalty_BT, mask_BT)
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, after_B, self.settings.gamma, self.settings.lam)
        columns["returns_BT"] = returns_BT = advantages_BT + values_BT
        columns["advantages_BT"] = whiten(advantages_BT, mask_BT) if self.settings.whiten else advantages_BT
        explained = float(explained_variance(values_BT, returns_BT, mask_BT))
        if math.isfinite(explained):
            ctx.metrics["explained_variance"] = explained
        return replace(batch, columns={**batch.columns, **columns})

    def _penalty(self, columns: Mapping[str, Tensor], mask_BT: Tensor, ctx: Context) -> Tensor:
        """beta times the KL estimate of each token, [B, T]; 0 without a reference and if the KL is in the loss."""
        old_BT, reference_BT = columns["old_logps_BT"], columns.get("reference_logps_BT")
        if reference_BT is None or self.kl.in_loss:
            return torch.zeros_like(old_BT)
        return self._beta(old_BT, reference_BT, mask_BT, ctx) * self.kl.estimate(old_BT, reference_BT)

    def _final(self, scores_B: Tensor, values_BT: Tensor, mask_BT: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Scores of the completions, and values of the states after their last tokens.

        With `truncated = "bootstrap"` a truncated completion has the value of its last state in place of its score.
        Every other completion has its score and the value 0.
        """
        if self.settings.truncated != "bootstrap":
            return scores_B, torch.zeros_like(scores_B)
        truncated_B = torch.from_numpy(rollout.truncated_B)
        next_B = (last_positions(mask_BT) + 1).clamp(max=mask_BT.shape[1] - 1)
        after_B = values_BT.gather(1, next_B[:, None])[:, 0]
        return torch.where(truncated_B, 0.0, scores_B), torch.where(truncated_B, after_B, 0.0)

    def _beta(self, old_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, ctx: Context) -> float:
        """beta of this step; with `kl_target` it also stores the next step's beta in the objective's state."""
        if not self.settings.kl_target:
            return self.settings.beta
        beta = ctx.state["beta"]
        rows = max(1, int(mask_BT.any(1).sum()))
        kl = float(per_row(old_BT - reference_BT, mask_BT).sum()) / rows
        ctx.state["beta"] = adapt_beta(beta, kl, self.settings.kl_target, rows, self.settings.kl_horizon)
        ctx.metrics["beta"] = beta
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
