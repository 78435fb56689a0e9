"""Reward models: a number per answer, trained on pairs so that the chosen answer's is larger.

P(chosen beats rejected) = s(r_w - r_l), s the logistic function (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1), so
the loss is -ln s(r_w - r_l - margin). It determines only differences of rewards; the penalty `centering`,
c (r_w + r_l)^2, keeps their level near 0 (Eisenstein et al. 2023, section 2). A ranking of K answers is given as its
K (K - 1) / 2 pairs.

A linear head in fp32 computes the reward from the hidden state of the answer's last token. That token is located by the
row's length, not by its id, which the padding may use too. The head is initialised to N(0, 1 / (width + 1)) (Stiennon
et al. 2020).

A finished stage stores the mean reward of held-out chosen answers and the standard deviation of all held-out answers.
Other stages get rewards standardised by these two, so a KL weight has the same meaning with every reward model. (The
standard deviation of the chosen answers alone is near 0 if good answers get similar rewards.)

Shapes: B rows, T positions, W width, P pairs.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.objectives.preference import pair_term, wins
from ingot.objectives.settings import RewardSettings
from ingot.train.objective import Context, Needs, Objective, Term

BIN_EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Bins of the calibration, over the predicted probability of the answer with the larger reward."""


class RewardHead(nn.Module):
    """Linear map of hidden states to rewards, computed in the precision of its weights even under autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width) / math.sqrt(width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_BTW: Tensor, lengths_B: Tensor) -> Tensor:
        """The reward of each row, [B], from the hidden state of its last token."""
        rows = torch.arange(len(hidden_BTW), device=hidden_BTW.device)
        last_BW = hidden_BTW[rows, lengths_B - 1].to(self.weight.dtype)
        with torch.autocast(last_BW.device.type, enabled=False):
            return F.linear(last_BW, self.weight, self.bias)[:, 0]


class RewardModel(nn.Module):
    """A trained reward model: (reward - `mean`) / `std` of complete conversations."""

    def __init__(self, model: nn.Module, head: nn.Module, mean: float, std: float):
        super().__init__()
        self.model, self.head, self.mean, self.std = model, head, mean, std

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.model(*arguments, **named)

    def scores(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """The standardised reward of each row, [B]; NaN for rows longer than the model's context.

        Args:
            ids_BT: prompts with their answers in the chat format, end of turn included, padded on the right.
            lengths_B: tokens of each row without padding.
        """
        context = int(self.model.config.context)  # pyright: ignore
        hidden_BTW = self.model(ids_BT[:, :context]).hidden
        reward_B = (self.head(hidden_BTW, lengths_B.clamp(max=context)) - self.mean) / self.std
        return reward_B.masked_fill(lengths_B > context, math.nan)


class Reward(Objective):
    """Bradley-Terry over pairs."""

    needs = Needs(generates_text=False)

    def __init__(self, settings: RewardSettings):
        self._margin, self._centering = settings.margin, settings.centering

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"reward": RewardHead(int(model.config.width))}  # pyright: ignore

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        reward_B = ctx.modules["reward"](out.hidden, batch.columns["lengths_B"])
        chosen_P, rejected_P = reward_B[0::2], reward_B[1::2]
        terms = {"reward": pair_term(batch, bradley_terry(chosen_P, rejected_P, self._margin))}
        if self._centering:
            level_P = (chosen_P + rejected_P).square()
            terms["centering"] = pair_term(batch, level_P, weight=self._centering, penalty=True)
        with torch.no_grad():
            terms["accuracy"] = pair_term(batch, wins(chosen_P, rejected_P), metric=True)
            terms["margin"] = pair_term(batch, chosen_P - rejected_P, metric=True)
        return terms

    def final_metrics(self, batches: Iterable[Batch], ctx: Context) -> dict[str, float]:
        rewards, lengths, head = [], [], ctx.modules["reward"]
        for batch in batches:
            rewards.append(ctx.over(ctx.model, batch, lambda out, rows: head(out.hidden, rows.columns["lengths_B"])))
            lengths.append(np.asarray(batch.labels_BT != batch.ignore).sum(1))  # of the answers, without their prompts
        return calibration(torch.cat(rewards).double().cpu().numpy(), np.concatenate(lengths))

    def companion(self, model: nn.Module, modules: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        return RewardModel(model, modules["reward"], result["reward_mean"], result["reward_std"])


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin: float = 0.0) -> Tensor:
    """-ln s(r_w - r_l - margin)."""
    return -F.logsigmoid(chosen_P - rejected_P - margin)


def calibration(reward_B: np.ndarray, length_B: np.ndarray) -> dict[str, float]:
    """Statistics and calibration of a reward model on held-out pairs (rows 2 i chosen, rows 2 i + 1 rejected).

    Returns:
        `reward_mean` of the chosen answers and `reward_std` of all answers; `length_correlation` of rewards with
        `length_B`, the tokens of the answers; per non-empty bin of the predicted probability
        `calibration/LOW-HIGH/...`: the number of `pairs`, the mean `predicted` probability, and the fraction in which
        the preferred answer was `chosen`; `calibration_error`, the mean over pairs of |predicted - chosen| of their
        bin.
    """
    chosen_P, rejected_P = reward_B[0::2], reward_B[1::2]
    margin_P = chosen_P - rejected_P
    correct_P = 0.5 * (1 + np.sign(margin_P))
    std = float(reward_B.std(ddof=1))
    metrics: dict[str, float] = {
        "reward_mean": float(chosen_P.mean()),
        "reward_std": std if std > 0 else 1.0,
        "length_correlation": _correlation(reward_B, length_B),
    }
    probability_P = 1 / (1 + np.exp(-np.abs(margin_P)))
    bin_P = np.clip(np.searchsorted(BIN_EDGES, probability_P, side="right") - 1, 0, len(BIN_EDGES) - 2)
    error = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(BIN_EDGES)):
        in_bin_P = bin_P == i
        if in_bin_P.any():
            predicted, chosen = float(probability_P[in_bin_P].mean()), float(correct_P[in_bin_P].mean())
            error += in_bin_P.mean() * abs(predicted - chosen)
            name = f"calibration/{low:g}-{high:g}"
            metrics |= {f"{name}/pairs": int(in_bin_P.sum()), f"{name}/predicted": predicted, f"{name}/chosen": chosen}
    return metrics | {"calibration_error": float(error)}


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation; 0 if one of the two is constant."""
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
