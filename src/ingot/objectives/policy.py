"""Losses of policy-gradient methods as pure functions: clipped ratios, clipped values, KL estimators, aggregation.

All losses are per position and none averages: the engine divides by the unit counts of the complete step.

**Which KL is optimised.** With x = ln(reference / policy) of a token sampled from the policy, k1 = -x, k2 = x^2 / 2 and
k3 = e^x - 1 - x estimate KL(policy || reference); k1 and k3 are unbiased (Schulman 2020, "Approximating KL
divergence"). The divergence that their gradients optimise depends on where the estimate enters:

| | in the reward (no gradient through it) | in the loss (gradient through it) |
|---|---|---|
| k1 | reverse KL | nothing: its gradient is 0 on average |
| k2 | no divergence | reverse KL, while the samples are from the policy itself |
| k3 | reverse minus forward KL, about 0 near the reference | forward KL |
| k3 x ratio | | reverse KL, also off-policy |

Reverse KL is KL(policy || reference), the one of RLHF. A test enumerates all sequences of a small model for each cell.

Shapes: B rows, T positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.train.objective import Term

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this before they are exponentiated."""


def log_ratios(logp_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, per_sequence: bool = False) -> Tensor:
    """ln(policy / sampling policy), clamped to +- `MAX_LOG_RATIO`, [B, T].

    Args:
        per_sequence: use one ratio for all tokens of a completion, the exponential of their mean log ratio
            (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7).
    """
    log_BT = logp_BT - old_BT
    if per_sequence:
        log_BT = (per_row(log_BT, mask_BT) / mask_BT.sum(1).clamp(min=1))[:, None].expand_as(log_BT)
    return log_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)) (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


def clipped(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float) -> Tensor:
    """Where clipping sets the gradient to 0, [B, T] bool."""
    return ((ratio_BT > 1 + high) & (advantages_BT > 0)) | ((ratio_BT < 1 - low) & (advantages_BT < 0))


def value_loss(values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, clip: float) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)."""
    near_BT = old_BT + (values_BT - old_BT).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square())


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    """ln(policy / reference): unbiased, and negative for about half of all tokens."""
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """(ln(policy / reference))^2 / 2: biased, never negative."""
    return 0.5 * (logp - reference).square()


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """reference / policy - 1 - ln(reference / policy): unbiased, never negative."""
    x = (reference - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x.exp() - 1 - x


class KL(NamedTuple):
    """A KL penalty that keeps a policy near its reference."""

    estimate: Callable[[Tensor, Tensor], Tensor]
    in_loss: bool
    """Whether it is a term of the loss; if not, it is part of the reward."""
    weighted: bool
    """Whether the estimate is multiplied by the policy ratio, which then also carries its gradient."""
    divergence: str
    """The divergence that it optimises in expectation, on samples of the policy itself."""


KLS: dict[str, KL] = {
    "k1-reward": KL(k1, False, False, "reverse KL"),
    "k2-reward": KL(k2, False, False, "no divergence"),
    "k3-reward": KL(k3, False, False, "reverse KL minus forward KL"),
    "k1-loss": KL(k1, True, False, "nothing"),
    "k2-loss": KL(k2, True, False, "reverse KL"),
    "k3-loss": KL(k3, True, False, "forward KL"),
    "k3-ratio-loss": KL(k3, True, True, "reverse KL"),
}


def per_row(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sum of each row over the mask, [B]."""
    return torch.where(mask_BT, x_BT, 0.0).sum(1)


def aggregate(x_BT: Tensor, mask_BT: Tensor, aggregation: str, length: int, weight: float = 1.0) -> Term:
    """A loss per token as a term of the step's loss.

    Args:
        aggregation: `token`, the mean over all tokens (DAPO); `sequence`, the mean over sequences of the mean over
            their tokens (GRPO as published: tokens of long completions weigh less); `constant`, the mean over sequences
            of their sum divided by `length` (Dr. GRPO: the unmodified policy gradient, up to a factor).
    """
    if aggregation == "token":
        return Term(per_row(x_BT, mask_BT).sum(), "token", weight)
    scale_B = mask_BT.sum(1).clamp(min=1) if aggregation == "sequence" else length
    return Term((per_row(x_BT, mask_BT) / scale_B).sum(), "sequence", weight)
