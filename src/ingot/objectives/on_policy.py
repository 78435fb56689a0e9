"""What ppo and grpo share: roll out, score, compare with the reference, and update a fixed number of times.

A step is: complete the prompts of its batch; score the completions; recompute their log-probabilities with the forward
pass that trains (the sampler's own differ by rounding, which a ratio would take for a change of policy); turn scores
into advantages, over all completions of the step; then `epochs` x `minibatches` updates. All that is decided before the
first update and travels as columns of the batch, so an update is a function of its rows alone.

The first update sees the policy that sampled. Its ratios are 1, whatever the method; that (where log-probabilities of
before the update are kept) and the distance of the sampler from the trainer are logged: a number that is off there says
that something is broken before it shows in a reward.

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
from ingot.objectives.on_policy_settings import SampledSettings
from ingot.objectives.policy import KLS, aggregated, clipped, k3, log_ratios, per_row, policy_loss
from ingot.objectives.reward_functions import Scorer
from ingot.objectives.rollout import Rollout, roll_out
from ingot.train.objective import Context, Mean, Needs, Objective, Term

S = TypeVar("S", bound=SampledSettings)


class Sampled(Objective, ABC, Generic[S]):
    """An objective whose data are its own samples."""

    aggregation, whole_sequences = "token", False

    def __init__(self, settings: S):
        self.settings, self.kl, self.minibatches = settings, KLS[settings.kl], settings.minibatches
        self.needs = Needs(
            dropout=False,
            best_metric="reward",
            higher_is_better=True,
            updates_per_pass=settings.minibatches,
            samples=True,
            initial_state=self.initial_state(),
        )
        self.samples = settings.samples
        self.scorer, self.gold = Scorer(settings.reward, "reward"), Scorer(settings.gold, "gold")
        self.clip = settings.clip, settings.clip if settings.clip_high is None else settings.clip_high

    def initial_state(self) -> dict[str, Any]:
        """What the objective keeps from step to step, before the first one."""
        return {}

    # -- before the updates ----------------------------------------------------------------------------------------

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        if batch.columns.get("lengths_B") is None:
            raise UserError("objective: found rows of running text, expected prompts; give a corpus of format prompts")
        settings, samples = self.settings, 1 if ctx.evaluating else self.samples
        played = roll_out(batch, ctx, samples=samples, max_new=settings.max_new, temperature=settings.temperature)
        scores_B = self.scorer(played, ctx)
        if settings.no_stop_reward is not None:
            truncated_B = torch.from_numpy(played.truncated_B)
            scores_B = torch.where(truncated_B, settings.no_stop_reward, scores_B)
        ctx.notes.update(described(played, scores_B))
        if self.gold.there(ctx):
            ctx.notes.update(_rewards(self.gold(played, ctx), "gold_reward"))
        if not ctx.evaluating:
            yield from self._updates(self.prepared(played, scores_B, ctx), ctx)

    @abstractmethod
    def prepared(self, played: Rollout, scores_B: Tensor, ctx: Context) -> Batch:
        """The rollout's batch with all columns that the loss reads; scores on the CPU, NaN where there is none."""

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
        later = replace(batch, columns={n: c for n, c in batch.columns.items() if n != "sampled_logps_BT"})
        for epoch in range(self.settings.epochs):
            order_B = np.arange(len(batch))
            if self.minibatches > 1:
                order_B = permute(order_B, len(batch), key_of(ctx.seed, ctx.step, epoch))
            for number, part in enumerate(np.array_split(order_B, self.minibatches)):
                chosen = later if epoch or number else batch
                yield chosen if self.minibatches == 1 else chosen.take(part)

    # -- an update -------------------------------------------------------------------------------------------------

    def policy_terms(self, logp_BT: Tensor, batch: Batch) -> dict[str, Term]:
        """The clipped policy loss, the KL from the reference where it stands in the loss, and what is logged."""
        mask_BT, columns = batch.labels_BT != batch.ignore, batch.columns
        advantages_BT, now_BT = columns["advantages_BT"], logp_BT.detach()
        old_BT = columns.get("old_logps_BT", now_BT)

        def term(x_BT: Tensor, weight: float = 1.0) -> Term:
            return aggregated(x_BT, mask_BT, self.aggregation, self.settings.max_new, weight)

        def metric(x_BT: Tensor) -> Term:
            return Term(per_row(x_BT, mask_BT).sum(), "token", metric=True)

        log_BT = log_ratios(logp_BT, old_BT, mask_BT, self.whole_sequences)
        ratio_BT = log_BT.exp()
        terms = {"policy": term(policy_loss(ratio_BT, advantages_BT, *self.clip))}
        reference_BT = columns.get("reference_logps_BT")
        if reference_BT is not None and self.kl.in_loss:
            kl_BT = self.kl.estimate(logp_BT, reference_BT)
            if self.kl.weighted:  # by ratios of tokens, whatever the policy's is of
                kl_BT = kl_BT * log_ratios(logp_BT, old_BT, mask_BT).exp()
            terms["kl"] = term(kl_BT, self.settings.beta)
        compared = "old_logps_BT" in columns  # else with itself, and the ratio is 1 whatever is broken
        with torch.no_grad():
            terms["weighted_logp"] = metric(advantages_BT * now_BT)
            if compared:
                terms["approx_kl"] = metric(k3(old_BT, now_BT))
                terms["clip_fraction"] = metric(clipped(ratio_BT, advantages_BT, *self.clip).float())
            if "sampled_logps_BT" in columns:
                if compared:
                    terms["first_ratio"] = metric(ratio_BT)
                terms["sampler_gap"] = metric((now_BT - columns["sampled_logps_BT"]).abs())
                if reference_BT is not None:
                    kl = per_row(now_BT - reference_BT, mask_BT).sum()
                    terms["kl_nats"] = Term(kl, "sequence", metric=True)
        return terms


def described(played: Rollout, scores_B: Tensor) -> dict[str, float | Mean]:
    """What is logged of a rollout; the reward is of the completions that could be scored."""
    sampled_BT, labels_BT = played.batch.columns["sampled_logps_BT"], played.batch.labels_BT
    unscored = float(scores_B.isnan().float().mean())
    return {
        **_rewards(scores_B, "reward", spread="reward_std"),
        "completion_tokens": float(played.completion_tokens_B.mean()),
        "truncated_share": float(played.truncated_B.mean()),
        "entropy_nats": -float(sampled_BT.sum() / (labels_BT != played.batch.ignore).sum()),
        **({"unscored_share": unscored} if unscored else {}),
    }


def _rewards(scores_B: Tensor, mean: str, spread: str | None = None) -> dict[str, float | Mean]:
    """Mean and spread of those that are known, by these names; nothing where none is."""
    known_K = scores_B[~scores_B.isnan()]
    if not len(known_K):
        return {}
    found: dict[str, float | Mean] = {mean: Mean(float(known_K.mean()), len(known_K))}
    return found | ({spread: Mean(float(known_K.std(correction=0)), len(known_K))} if spread else {})


def without(batch: Batch, dropped_B: np.ndarray) -> Batch:
    """The same rows, those that are dropped without labels: they keep their place and count for nothing."""
    return replace(batch, labels_BT=np.where(dropped_B[:, None], batch.ignore, batch.labels_BT))
