"""From rewards to advantages: generalised advantage estimation, whitening, and baselines within a group of samples.

Pure functions of tensors. A completion is a run of labelled positions in its row (`mask`, true where the label counts),
so position t stands for the action y_t, and what is at t in `values` was measured on the state before y_t was chosen.

Shapes: B rows, T positions, P prompts, G samples of a prompt.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to a group's standard deviation before dividing by it."""


def last_positions(mask_BT: Tensor) -> Tensor:
    """The last true position of each row [B] int64; 0 where there is none."""
    place_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (place_T * mask_BT).amax(1)


def token_rewards(scores_B: Tensor, penalty_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """r_t = -penalty_t, and the score of the whole completion on its last token: the stop token, if one came.

    Where the score stands one place later, on the padding after the stop token, the advantage of the stop token is off
    by (1 - lambda) (R - V(after the end)), and truncated rows are treated otherwise than whole ones.
    """
    rewards_BT = torch.where(mask_BT, -penalty_BT, 0.0)
    return rewards_BT.scatter_add(1, last_positions(mask_BT)[:, None], (scores_B * mask_BT.any(1))[:, None])


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, after_B: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), 0 outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, from a row's last position backwards.

    Args:
        after_B: value of the state after the last action: 0 where the episode ended there.
    """
    advantages_BT = torch.zeros_like(values_BT)
    value_B, advantage_B = after_B, torch.zeros_like(after_B)
    for t in range(mask_BT.shape[1] - 1, -1, -1):
        here_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(here_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = torch.where(here_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = torch.where(here_B, advantage_B, 0.0)
    return advantages_BT


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all positions of the mask together, 0 elsewhere; all zeros where nothing varies."""
    x_N = x_BT[mask_BT]
    if not len(x_N):
        return torch.zeros_like(x_BT)
    return torch.where(mask_BT, (x_BT - x_N.mean()) * (x_N.var(correction=0) + 1e-8).rsqrt(), 0.0)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 is a perfect value function, 0 no better than a number.

    Not finite where there are no returns or they do not vary, so that there was nothing to explain.
    """
    returns_N, error_N = returns_BT[mask_BT], (returns_BT - values_BT)[mask_BT]
    if not len(returns_N):
        return returns_N.new_tensor(math.nan)
    return 1 - error_N.var(correction=0) / returns_N.var(correction=0)


def _mean(scores_PG: Tensor, known_PG: Tensor) -> Tensor:
    return _sum(scores_PG, known_PG) / known_PG.sum(1, keepdim=True).clamp(min=1)


def _others(scores_PG: Tensor, known_PG: Tensor) -> Tensor:
    """Mean of the other samples; a sample alone is its own baseline, which leaves it an advantage of 0."""
    others_P1 = known_PG.sum(1, keepdim=True) - 1
    mean_PG = (_sum(scores_PG, known_PG) - scores_PG) / others_P1.clamp(min=1)
    return torch.where(others_P1 > 0, mean_PG, scores_PG)


def _sum(scores_PG: Tensor, known_PG: Tensor) -> Tensor:
    return torch.where(known_PG, scores_PG, 0.0).sum(1, keepdim=True)


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": _mean, "others": _others}
"""What a sample is compared with: the mean of its group (GRPO), or of the others in it (RLOO)."""


def group_advantages(scores_PG: Tensor, baseline: str, standardise: bool) -> Tensor:
    """A_i = r_i - baseline, divided by the group's standard deviation if asked.

    With the group's mean as baseline the expected gradient is (1 - 1 / G) of the true one; with the mean of the others
    it is the true one (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740). Dividing by the standard deviation
    (Shao et al. 2024, arXiv:2402.03300) lets prompts of which nearly all or nearly no samples succeed weigh more, and
    changes what a KL penalty is worth; Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) leaves it out.

    Args:
        scores_PG: NaN where a completion could not be scored: its advantage is 0 and it is in no baseline.
        baseline: a name of `BASELINES`.
        standardise: divide by (standard deviation with G - 1 below the fraction, + 1e-4).
    """
    known_PG = ~scores_PG.isnan()
    # Equal scores become zeros, whose mean is exact: what rounding leaves of them, standardised, would be learned from.
    scores_PG = scores_PG - scores_PG.nan_to_num(nan=-torch.inf).amax(1, keepdim=True)
    centred_PG = scores_PG - BASELINES[baseline](scores_PG, known_PG)
    if standardise:
        mean_P1, degrees_P1 = _mean(scores_PG, known_PG), (known_PG.sum(1, keepdim=True) - 1).clamp(min=1)
        centred_PG = centred_PG / ((_sum((scores_PG - mean_P1).square(), known_PG) / degrees_P1).sqrt() + STD_FLOOR)
    return torch.where(known_PG, centred_PG, 0.0)


def to_go(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sum of x from each position of the mask to the end of its row; 0 outside the mask."""
    kept_BT = torch.where(mask_BT, x_BT, 0.0)
    return torch.where(mask_BT, kept_BT.flip(1).cumsum(1).flip(1), 0.0)


def adapted(beta: float, kl: float, target: float, rows: int, horizon: int) -> float:
    """The KL coefficient after a step (Ziegler et al. 2019, arXiv:1909.08593, 2.2): up where the KL is above target.

    Args:
        kl: mean KL of a completion, in nats, and `target` what it should be.
        rows: completions of the step; after `horizon` of them a KL far above target has raised beta by a factor e^0.2.
            A step counts for one horizon at most, or beta would lose its sign.
    """
    assert math.isfinite(kl)
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(1.0, rows / horizon))
