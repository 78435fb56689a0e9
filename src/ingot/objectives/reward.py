"""A reward model from comparisons: one number for an answer, higher for the one that people chose.

P(chosen beats rejected) = s(r_w - r_l), s the logistic function (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1), so
the loss is -ln s(r_w - r_l - margin). Differences alone are learned; `centering` holds the level near 0 by
c (r_w + r_l)^2 (Eisenstein et al. 2023, section 2). A ranking of K answers is its K (K - 1) / 2 pairs.

The number is read by a linear head in fp32 from the hidden state of the last token that is there: by the length of the
row, never by the id, which may be the padding's too. The head starts at N(0, 1 / (width + 1)) (Stiennon et al. 2020).

A finished stage keeps the mean of its rewards of held-out chosen answers, and the spread of those of all held-out
answers. Another stage that names it gets rewards in those units, so that a weight of the KL beside it means the same
for every reward model. (The spread of chosen answers alone is no unit: where good ones are alike, it is near 0.)

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

BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Borders of the predicted probability that the preferred answer is the better one, for the calibration."""


class RewardHead(nn.Module):
    """Hidden states to rewards, in the precision of its weights whatever the forward pass is in."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width) / math.sqrt(width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_BTW: Tensor, lengths_B: Tensor) -> Tensor:
        """The reward of each row, (B,), read where its last token is."""
        rows = torch.arange(len(hidden_BTW), device=hidden_BTW.device)
        last_BW = hidden_BTW[rows, lengths_B - 1].to(self.weight.dtype)
        with torch.autocast(last_BW.device.type, enabled=False):
            return F.linear(last_BW, self.weight, self.bias)[:, 0]


class RewardModel(nn.Module):
    """A finished reward model: rewards of whole conversations, 0 the mean of good held-out ones, 1 a spread above."""

    def __init__(self, model: nn.Module, head: nn.Module, mean: float, std: float):
        super().__init__()
        self.model, self.head, self.mean, self.std = model, head, mean, std

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.model(*arguments, **named)

    def scores(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """The reward of each row, (B,); NaN for one that is longer than the model's context, which cannot be scored.

        Args:
            ids_BT: prompts with their answers as the chat format writes them, the end of the turn included, from the
                left; what follows is never looked at.
            lengths_B: tokens of each.
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

    def conclude(self, batches: Iterable[Batch], ctx: Context) -> dict[str, float]:
        rewards, lengths, head = [], [], ctx.modules["reward"]
        for batch in batches:
            rewards.append(ctx.over(ctx.model, batch, lambda out, rows: head(out.hidden, rows.columns["lengths_B"])))
            lengths.append(np.asarray(batch.columns["lengths_B"]))
        return calibration(torch.cat(rewards).double().cpu().numpy(), np.concatenate(lengths))

    def companion(self, model: nn.Module, modules: nn.ModuleDict, result: Mapping[str, Any]) -> nn.Module:
        return RewardModel(model, modules["reward"], result["reward_mean"], result["reward_std"])


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin: float = 0.0) -> Tensor:
    """-ln s(r_w - r_l - margin)."""
    return -F.logsigmoid(chosen_P - rejected_P - margin)


def calibration(reward_B: np.ndarray, length_B: np.ndarray) -> dict[str, float]:
    """What there is to know of a reward model on held-out pairs (rows 2 i and 2 i + 1 chosen and rejected).

    Returns:
        `reward_mean` of the chosen answers, `reward_std` of all; `length_correlation` of rewards with tokens; per bin
        of the predicted probability `calibration/LOW-HIGH/...`: `pairs` in it, the mean `predicted`, and how often
        the answer it prefers was `chosen`; `calibration_error`, their mean distance.
    """
    chosen_P, rejected_P = reward_B[0::2], reward_B[1::2]
    delta_P = chosen_P - rejected_P
    won_P = 0.5 * (1 + np.sign(delta_P))
    spread = float(reward_B.std(ddof=1))
    found: dict[str, float] = {
        "reward_mean": float(chosen_P.mean()),
        "reward_std": spread if spread > 0 else 1.0,
        "length_correlation": _correlation(reward_B, length_B),
    }
    sure_P = 1 / (1 + np.exp(-np.abs(delta_P)))
    place_P = np.clip(np.searchsorted(BINS, sure_P, side="right") - 1, 0, len(BINS) - 2)
    error = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(BINS)):
        here = place_P == i
        if here.any():
            predicted, chosen = float(sure_P[here].mean()), float(won_P[here].mean())
            error += here.mean() * abs(predicted - chosen)
            name = f"calibration/{low:g}-{high:g}"
            found |= {f"{name}/pairs": int(here.sum()), f"{name}/predicted": predicted, f"{name}/chosen": chosen}
    return found | {"calibration_error": float(error)}


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 where one of the two does not vary."""
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
