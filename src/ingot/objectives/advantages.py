"""Rewards to advantages: generalised advantage estimation, whitening, and group baselines.

Pure functions of tensors. `mask` is true at the labelled positions of a row, which are the tokens of its completion.
Position t is the action y_t; `values` at t is the value of the state before y_t.

Shapes: B rows, T positions, P prompts, G samples of a prompt.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to a group's standard deviation before dividing by it."""


def last_positions(mask_BT: Tensor) -> Tensor:
    """The last true position of each row, [B] int64; 0 for a row without one."""
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (position_T * mask_BT).amax(1)


def token_rewards(scores_B: Tensor, penalty_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """r_t = -penalty_t, plus the completion's score at its last token (the stop token, unless it was truncated).

    Placing the score one position later, on the padding, would bias the advantage of the stop token by
    (1 - lambda) (R - V(after the end)) and treat truncated and complete rows differently.
    """
    rewards_BT = torch.where(mask_BT, -penalty_BT, 0.0)
    return rewards_BT.scatter_add(1, last_positions(mask_BT)[:, None], (scores_B * mask_BT.any(1))[:, None])


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, after_B: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), [B, T], 0 outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, from a row's last position backwards.

    Args:
        after_B: value of the state after the last action; 0 if the episode ended there.
    """
    advantages_BT = torch.zeros_like(values_BT)
    value_B, advantage_B = after_B, torch.zeros_like(after_B)
    for t in range(mask_BT.shape[1] - 1, -1, -1):
        mask_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(mask_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = torch.where(mask_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = torch.where(mask_B, advantage_B, 0.0)
    return advantages_BT


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Standardise to mean 0 and variance 1 over all positions of the mask; 0 elsewhere, and if x is constant."""
    x_N = x_BT[mask_BT]
    if not len(x_N):
        return torch.zeros_like(x_BT)
    return torch.where(mask_BT, (x_BT - x_N.mean()) * (x_N.var(correction=0) + 1e-8).rsqrt(), 0.0)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 for a perfect value function, 0 for a constant.

    Not finite if there are no returns or their variance is 0.
    """
    returns_N, error_N = returns_BT[mask_BT], (returns_BT - values_BT)[mask_BT]
    if not len(returns_N):
        return returns_N.new_tensor(math.nan)
    return 1 - error_N.var(correction=0) / returns_N.var(correction=0)


def _mean(scores_PG: Tensor, scored_PG: Tensor) -> Tensor:
    return _sum(scores_PG, scored_PG) / scored_PG.sum(1, keepdim=True).clamp(min=1)


def _others(scores_PG: Tensor, scored_PG: Tensor) -> Tensor:
    """Mean of the other samples; a single sample is its own baseline, so its advantage is 0."""
    others_P1 = scored_PG.sum(1, keepdim=True) - 1
    mean_PG = (_sum(scores_PG, scored_PG) - scores_PG) / others_P1.clamp(min=1)
    return torch.where(others_P1 > 0, mean_PG, scores_PG)


def _sum(scores_PG: Tensor, scored_PG: Tensor) -> Tensor:
    return torch.where(scored_PG, scores_PG, 0.0).sum(1, keepdim=True)


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": _mean, "others": _others}
"""Baseline of a sample: the mean of its group (GRPO), or of the other samples in it (RLOO)."""


def group_advantages(scores_PG: Tensor, baseline: str, standardise: bool) -> Tensor:
    """A_i = r_i - baseline, optionally divided by the group's standard deviation, [P, G].

    With the group's mean as baseline the expected gradient is (1 - 1 / G) of the true one; with the mean of the others
    it is the true one (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740). Dividing by the standard deviation
    (Shao et al. 2024, arXiv:2402.03300) gives more weight to prompts with a success rate near 0 or 1, and changes the
    effective weight of a KL penalty; Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) omits it.

    Args:
        scores_PG: NaN where a completion could not be scored: its advantage is 0 and no baseline includes it.
        baseline: a key of `BASELINES`.
        standardise: divide by the sample standard deviation (G - 1 degrees of freedom) plus `STD_FLOOR`.
    """
    scored_PG = ~scores_PG.isnan()
    # Equal scores become exact zeros here; otherwise standardising would amplify the rounding error of their mean.
    scores_PG = scores_PG - scores_PG.nan_to_num(nan=-torch.inf).amax(1, keepdim=True)
    centred_PG = scores_PG - BASELINES[baseline](scores_PG, scored_PG)
    if standardise:
        mean_P1, degrees_P1 = _mean(scores_PG, scored_PG), (scored_PG.sum(1, keepdim=True) - 1).clamp(min=1)
        centred_PG = centred_PG / ((_sum((scores_PG - mean_P1).square(), scored_PG) / degrees_P1).sqrt() + STD_FLOOR)
    return torch.where(scored_PG, centred_PG, 0.0)


def sum_to_end(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sum of x from each position of the mask to the end of its row (a "reward-to-go"); 0 outside the mask."""
    masked_BT = torch.where(mask_BT, x_BT, 0.0)
    return torch.where(mask_BT, masked_BT.flip(1).cumsum(1).flip(1), 0.0)


def adapt_beta(beta: float, kl: float, target: float, rows: int, horizon: int) -> float:
    """The KL coefficient of the next step (Ziegler et al. 2019, arXiv:1909.08593, 2.2): larger if KL exceeds target.

    Args:
        kl: mean KL of a completion, in nats.
        target: desired KL of a completion, in nats.
        rows: completions of the step. A KL far above target multiplies beta by e^0.2 every `horizon` completions. A
            step counts as one horizon at most, or beta could change its sign.
    """
    assert math.isfinite(kl)
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(1.0, rows / horizon))
