"""Base class of ppo and grpo: roll out, score, compare with the reference, and update a fixed number of times.

A step has these parts:

1. Complete the prompts of the batch.
2. Score the completions.
3. Recompute their log-probabilities with the training forward pass. The sampler's own differ by rounding, which a ratio
   would mistake for a change of the policy.
4. Turn scores into advantages, over all completions of the step.
5. Run `epochs` x `minibatches` updates.

Parts 1 to 4 finish before the first update and pass their results on as columns of the batch, so an update is a
function of its rows alone.

The first update trains the policy that sampled, so its ratios are 1 with every method. The metric `first_ratio` logs
them (if old log-probabilities are stored), and `sampler_gap` the difference between sampler and trainer. A deviation
reveals a bug before it shows in the reward.

Shapes: B completions, T positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.data.sampler import key_of, permute
from ingot.model.losses import token_logps
from ingot.objectives.on_policy_settings import OnPolicySettings
from ingot.objectives.policy import KLS, aggregate, clipped, k3, log_ratios, per_row, policy_loss
from ingot.objectives.reward_functions import Scorer
from ingot.objectives.rollout import Rollout, roll_out
from ingot.train.objective import Context, Mean, Needs, Objective, Term

S = TypeVar("S", bound=OnPolicySettings)


class OnPolicyObjective(Objective, ABC, Generic[S]):
    """An objective that trains on samples of its own policy."""

    aggregation, per_sequence = "token", False

    def __init__(self, settings: S):
        self.settings, self.kl, self.minibatches = settings, KLS[settings.kl], settings.minibatches
        self.needs = Needs(
            dropout=False,
            best_metric="reward",
            higher_is_better=True,
            updates_per_pass=settings.minibatches,
            samples=True,
            whole_step=True,
            initial_state=self.initial_state(),
        )
        self.samples = settings.samples
        self.scorer, self.gold = Scorer(settings.reward, "reward"), Scorer(settings.gold, "gold")
        self.clip = settings.clip, settings.clip if settings.clip_high is None else settings.clip_high

    def initial_state(self) -> dict[str, Any]:
        """`Context.state` before the first step."""
        return {}

    # -- before the updates ----------------------------------------------------------------------------------------

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        if batch.columns.get("lengths_B") is None:
            raise UserError("objective: found rows of running text, expected prompts; give a corpus of format prompts")
        settings, samples = self.settings, 1 if ctx.evaluating else self.samples
        rollout = roll_out(batch, ctx, samples=samples, max_new=settings.max_new, temperature=settings.temperature)
        scores_B = self.scorer(rollout, ctx)
        if settings.no_stop_reward is not None:
            truncated_B = torch.from_numpy(rollout.truncated_B)
            scores_B = torch.where(truncated_B, settings.no_stop_reward, scores_B)
        ctx.metrics.update(rollout_metrics(rollout, scores_B))
        if self.gold.available(ctx):
            ctx.metrics.update(_reward_metrics(self.gold(rollout, ctx), "gold_reward"))
        if not ctx.evaluating:
            yield from self._updates(self.training_batch(rollout, scores_B, ctx), ctx)

    @abstractmethod
    def training_batch(self, rollout: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        """The rollout's batch with all columns that the loss reads.

        Args:
            scores_B: on the CPU; NaN for a completion that could not be scored.
        """

    def reference_logps(self, batch: Batch, ctx: Context) -> Tensor:
        """ln p of the completions' tokens under the reference, at the policy's temperature, [B, T] on the CPU."""
        return ctx.over(ctx.companions["reference"], batch, self.logps)

    def logps(self, out: Any, batch: Batch) -> Tensor:
        """ln p of every labelled token under the policy (at its temperature), [B, T], 0 elsewhere."""
        temperature = self.settings.temperature
        return token_logps(out.hidden, out.head, batch.labels_BT, temperature=temperature, ignore=batch.ignore)

    def _updates(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        if len(batch) < self.minibatches:
            raise UserError(
                f"objective.minibatches: found {self.minibatches} for the {len(batch)} completions of a step, expected "
                "at most one for each; set fewer, or a larger batch"
            )
        # Only the first update trains the policy that sampled, so only it compares with the sampler.
        later = replace(batch, columns={n: c for n, c in batch.columns.items() if n != "sampled_logps_BT"})
        for epoch in range(self.settings.epochs):
            order_B = np.arange(len(batch))
            if self.minibatches > 1:
                order_B = permute(order_B, len(batch), key_of(ctx.seed, ctx.step, epoch))
            for number, rows in enumerate(np.array_split(order_B, self.minibatches)):
                source = later if epoch or number else batch
                yield source if self.minibatches == 1 else source.take(rows)

    # -- an update -------------------------------------------------------------------------------------------------

    def policy_terms(self, logp_BT: Tensor, batch: Batch) -> dict[str, Term]:
        """The clipped policy loss, the KL from the reference if it is a term of the loss, and the metrics."""
        mask_BT, columns = batch.labels_BT != batch.ignore, batch.columns
        advantages_BT, now_BT = columns["advantages_BT"], logp_BT.detach()
        old_BT = columns.get("old_logps_BT", now_BT)

        def term(x_BT: Tensor, weight: float = 1.0) -> Term:
            return aggregate(x_BT, mask_BT, self.aggregation, self.settings.max_new, weight)

        def metric(x_BT: Tensor) -> Term:
            return Term(per_row(x_BT, mask_BT).sum(), "token", metric=True)

        log_BT = log_ratios(logp_BT, old_BT, mask_BT, self.per_sequence)
        ratio_BT = log_BT.exp()
        terms = {"policy": term(policy_loss(ratio_BT, advantages_BT, *self.clip))}
        reference_BT = columns.get("reference_logps_BT")
        if reference_BT is not None and self.kl.in_loss:
            kl_BT = self.kl.estimate(logp_BT, reference_BT)
            if self.kl.weighted:  # a KL per token needs ratios per token, also if the policy loss uses sequence ratios
                kl_BT = kl_BT * log_ratios(logp_BT, old_BT, mask_BT).exp()
            terms["kl"] = term(kl_BT, self.settings.beta)
        has_old_logps = "old_logps_BT" in columns  # without them every ratio is 1, so its metrics carry no information
        with torch.no_grad():
            terms["weighted_logp"] = metric(advantages_BT * now_BT)
            if has_old_logps:
                terms["approx_kl"] = metric(k3(old_BT, now_BT))
                terms["clip_fraction"] = metric(clipped(ratio_BT, advantages_BT, *self.clip).float())
            if "sampled_logps_BT" in columns:
                if has_old_logps:
                    terms["first_ratio"] = metric(ratio_BT)
                terms["sampler_gap"] = metric((now_BT - columns["sampled_logps_BT"]).abs())
                if reference_BT is not None:
                    kl = per_row(now_BT - reference_BT, mask_BT).sum()
                    terms["kl_nats"] = Term(kl, "sequence", metric=True)
        return terms


def rollout_metrics(rollout: Rollout, scores_B: Tensor) -> dict[str, float | Mean]:
    """Metrics of a rollout; reward statistics are over the scored completions."""
    sampled_BT, labels_BT = rollout.batch.columns["sampled_logps_BT"], rollout.batch.labels_BT
    unscored = float(scores_B.isnan().float().mean())
    return {
        **_reward_metrics(scores_B, "reward", std_name="reward_std"),
        "completion_tokens": float(rollout.completion_tokens_B.mean()),
        "truncated_fraction": float(rollout.truncated_B.mean()),
        "entropy_nats": -float(sampled_BT.sum() / (labels_BT != rollout.batch.ignore).sum()),
        **({"unscored_fraction": unscored} if unscored else {}),
    }


def _reward_metrics(scores_B: Tensor, mean_name: str, std_name: str | None = None) -> dict[str, float | Mean]:
    """Mean and standard deviation of the scores that are not NaN; empty if all are."""
    scored_K = scores_B[~scores_B.isnan()]
    if not len(scored_K):
        return {}
    mean = Mean(float(scored_K.mean()), len(scored_K), tuple(scored_K.tolist()))
    metrics: dict[str, float | Mean] = {mean_name: mean}
    if std_name:
        metrics[std_name] = Mean(float(scored_K.std(correction=0)), len(scored_K))
    return metrics
