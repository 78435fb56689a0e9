"""Learning from comparisons without a reward model: DPO and its family, one pure function each.

Of a pair with one prompt, a score says how much the model likes an answer, and a loss is a function of the difference h
between the chosen answer's score and the rejected one's. Log-probabilities are sums over the answer and its end, the
prompt left out; a mean instead of the sum is another method, and is named where it is one.

| loss | score | of h | source |
|---|---|---|---|
| sigmoid | ln p - ln p_reference | -ln s(b h); cDPO with `label_smoothing` | Rafailov et al. 2023, eq. 7 |
| robust | the same | unbiased where a known share of the labels is wrong | Chowdhury et al. 2024, eq. 12 |
| ipo | the same, a token | (h - 1 / 2b)^2 | Azar et al. 2023, eq. 17 |
| hinge | the same | max(0, 1 - b h) | Zhao et al. 2023 (SLiC) |
| simpo | ln p, a token | -ln s(b h - gamma) | Meng et al. 2024, eq. 6 |
| orpo | ln odds of p, a token | -b ln s(h), beside the likelihood of the chosen answer | Hong et al. 2024, eq. 6 |
| cpo | ln p | -ln s(b h), beside the likelihood of the chosen answer | Xu et al. 2024, eq. 5 |

IPO is written with sums in its paper, and its authors have said that they divide by the length: `length_norm = false`
takes the sum. KTO (Ethayarajh et al. 2024) takes each side by itself.

The reference never changes, so what it says of an answer is a column of the data, read once for all epochs and kept in
the stage's directory (`annotate`); where not every row will be seen, it is computed as rows come. Rejected: keeping the
reference beside the policy while training (twice the memory for the same numbers).

Shapes: B rows, T positions, P pairs; rows 2 i and 2 i + 1 are the chosen and the rejected side of pair i.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.model.losses import token_logps
from ingot.objectives.settings import PreferenceSettings, UnpairedSettings
from ingot.train.objective import Column, Context, Needs, Objective, Term

REFERENCE = "reference_logps"
"""The column of what the reference says of each answer."""


@dataclass(frozen=True)
class Options:
    """What the losses have besides their h."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0


class Side(NamedTuple):
    """The chosen or the rejected answers of P pairs."""

    logp_P: Tensor
    """ln p of the whole answer."""
    reference_P: Tensor
    """The same under the reference."""
    tokens_P: Tensor


def ratio(side: Side) -> Tensor:
    return side.logp_P - side.reference_P


def mean_ratio(side: Side) -> Tensor:
    return ratio(side) / side.tokens_P


def mean(side: Side) -> Tensor:
    return side.logp_P / side.tokens_P


def total(side: Side) -> Tensor:
    return side.logp_P


def log_odds(side: Side) -> Tensor:
    """ln(p / (1 - p)) of the mean probability a token, without losing digits where p is near 1."""
    return mean(side) - log1mexp(mean(side))


def log1mexp(x: Tensor) -> Tensor:
    """ln(1 - e^x) for x < 0 (Maechler 2012): by expm1 near 0, where 1 - e^x cancels, and by log1p elsewhere."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, -1.0)))  # each branch of its own argument: no NaN gradients
    return torch.where(near, by_expm1, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def sigmoid(h_P: Tensor, o: Options) -> Tensor:
    e = o.label_smoothing
    return -(1 - e) * F.logsigmoid(o.beta * h_P) - e * F.logsigmoid(-o.beta * h_P)


def robust(h_P: Tensor, o: Options) -> Tensor:
    e = o.label_smoothing
    return (-(1 - e) * F.logsigmoid(o.beta * h_P) + e * F.logsigmoid(-o.beta * h_P)) / (1 - 2 * e)


def ipo(h_P: Tensor, o: Options) -> Tensor:
    return (h_P - 1 / (2 * o.beta)).square()


def hinge(h_P: Tensor, o: Options) -> Tensor:
    return F.relu(1 - o.beta * h_P)


def simpo(h_P: Tensor, o: Options) -> Tensor:
    return -F.logsigmoid(o.beta * h_P - o.gamma)


def orpo(h_P: Tensor, o: Options) -> Tensor:
    return -o.beta * F.logsigmoid(h_P)


def reference_logps(batch: Batch, ctx: Context) -> dict[str, Tensor]:
    """The column of ln p of every row's answer under the reference, [B] on the CPU."""
    return {REFERENCE: ctx.over(ctx.companions["reference"], batch, answer_logps).cpu()}


LOSSES: dict[str, Callable[[Tensor, Options], Tensor]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "orpo": orpo,
    "cpo": sigmoid,
}
SCORES: dict[str, Callable[[Side], Tensor]] = {"simpo": mean, "orpo": log_odds, "cpo": total}
"""Scores of the losses without a reference; the others' is the ratio."""


def kto(ratio_B: Tensor, liked_B: Tensor, zero: Tensor, o: Options, liked: float, disliked: float) -> Tensor:
    """Each answer's loss: 1 - s(b (ratio - zero)) where it was liked, 1 - s(b (zero - ratio)) where it was not.

    `zero` is what an answer that has nothing to do with its prompt gets, and takes no gradient (the paper's eq. 8).
    """
    gain_B = o.beta * (ratio_B - zero)
    return torch.where(liked_B, liked * torch.sigmoid(-gain_B), disliked * torch.sigmoid(gain_B))


def answer_logps(out: Any, batch: Batch) -> Tensor:
    """ln p of each row's answer, its end included, (B,)."""
    return token_logps(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore).sum(1)


def pair_term(batch: Batch, value_P: Tensor, **more: Any) -> Term:
    """A term of a value of each pair, of those that are whole."""
    return Term(torch.where(batch.whole(), value_P, 0.0).sum(), "pair", **more)


class Preference(Objective):
    """A loss of the family above."""

    def __init__(self, settings: PreferenceSettings):
        loss = settings.loss
        self._loss = LOSSES[loss]
        by_token = loss == "ipo" if settings.length_norm is None else settings.length_norm
        self._score = SCORES.get(loss) or (mean_ratio if by_token else ratio)
        beta = settings.beta or (2.0 if loss == "simpo" else 0.1)
        self._options = Options(beta, settings.label_smoothing, settings.gamma)
        self._sft = float(loss in ("orpo", "cpo")) if settings.sft_weight is None else settings.sft_weight
        columns = () if loss in SCORES else (Column(REFERENCE),)
        self.needs = Needs(columns=columns, companions_after_annotate=False, dropout=False)

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return reference_logps(batch, ctx)

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        chosen, rejected = _sides(answer_logps(out, batch), batch)
        scores = self._score(chosen), self._score(rejected)

        terms = {"preference": pair_term(batch, self._loss(scores[0] - scores[1], self._options))}
        if self._sft:
            terms["sft"] = pair_term(batch, -mean(chosen), weight=self._sft, penalty=True)
        with torch.no_grad():
            watched = _watched(chosen, rejected, *(self._options.beta * score for score in scores))
            return terms | {name: pair_term(batch, value_P, metric=True) for name, value_P in watched.items()}


class Unpaired(Objective):
    """KTO: every answer by itself, liked (chosen) or not (rejected).

    The zero is the mean ratio of answers that belong to another prompt of the same step, no less than 0; it is 0 where
    all pairs of a step have one prompt.

    The paper wants weight x number of the liked ones between 1 and 4/3 times that of the others.
    """

    needs = Needs(columns=(Column(REFERENCE),), dropout=False)

    def __init__(self, settings: UnpairedSettings):
        self._options, self._weights = Options(settings.beta), (settings.desirable, settings.undesirable)

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return reference_logps(batch, ctx)

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        batch = self.annotated(batch, ctx)
        other = mismatched(batch, ctx.model.config.context)  # pyright: ignore
        zero = 0.0
        if other is not None:
            policy, reference = (
                ctx.over(model, other, answer_logps) for model in (ctx.model, ctx.companions["reference"])
            )
            zero = max(0.0, float((policy - reference).mean()))
        elif len(batch) == batch.group and not ctx.evaluating:
            raise UserError("objective kto: a step of one pair has no answer of another prompt; set batch to 2 or more")
        ctx.notes["kl_zero"] = zero
        yield replace(batch, columns={**batch.columns, "zero_B": np.full(len(batch), zero)})

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        logp_B = answer_logps(out, batch)
        there_B = (batch.labels_BT != batch.ignore).any(1)
        liked_B = torch.arange(len(batch), device=logp_B.device) % batch.group == 0
        ratio_B = logp_B - batch.columns[f"{REFERENCE}_B"].to(logp_B.dtype)
        loss_B = kto(ratio_B, liked_B, batch.columns["zero_B"].to(logp_B.dtype), self._options, *self._weights)
        with torch.no_grad():
            chosen, rejected = _sides(logp_B, batch)
            watched = _watched(chosen, rejected, *(self._options.beta * ratio(side) for side in (chosen, rejected)))
        return {
            "preference": Term(torch.where(there_B, loss_B, 0.0).sum(), "sequence"),
            **{name: pair_term(batch, value_P, metric=True) for name, value_P in watched.items()},
        }


def mismatched(batch: Batch, context: int) -> Batch | None:
    """Each prompt with the answer of the same side of the next pair of another prompt; None where there is no other.

    What goes beyond the context is cut: these answers are not learned from.
    """
    label_BT, ids_BT = batch.labels_BT, batch.ids_BT
    first_B = (label_BT != batch.ignore).argmax(1)  # the last id of the prompt, whose label begins the answer
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    matched = _of_another_prompt(batch, first_B)
    for row, other in matched:
        end = batch.columns["lengths_B"][other]
        ids = np.concatenate([ids_BT[row, : first_B[row] + 1], ids_BT[other, first_B[other] + 1 : end]])
        labels = np.full(len(ids), batch.ignore)
        labels[first_B[row] :] = label_BT[other, first_B[other] : end]
        rows.append((ids[:context], labels[:context]))
    if not rows:
        return None
    there = [row for row, _ in matched]
    width = max(len(ids) for ids, _ in rows)
    new_ids, new_labels = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), batch.ignore)
    for i, (ids, labels) in enumerate(rows):
        new_ids[i, : len(ids)], new_labels[i, : len(labels)] = ids, labels
    positions = np.broadcast_to(np.arange(width), new_ids.shape).copy()
    return Batch(new_ids, new_labels, positions, None, batch.source_B[there], batch.row_B[there], batch.ignore)


def _of_another_prompt(batch: Batch, first_B: np.ndarray) -> list[tuple[int, int]]:
    """Rows that have an answer, each with the next one of its side whose prompt, up to `first_B`, is another."""
    there = np.flatnonzero((batch.labels_BT != batch.ignore).any(1))
    prompts = {row: batch.ids_BT[row, : first_B[row] + 1].tobytes() for row in there}
    found = []
    for side in range(batch.group):
        alike = [row for row in there if row % batch.group == side]
        for i, row in enumerate(alike):
            following = (*alike[i + 1 :], *alike[:i])
            other = next((o for o in following if prompts[o] != prompts[row]), None)
            if other is not None:
                found.append((row, other))
    return sorted(found)


def _sides(logp_B: Tensor, batch: Batch) -> tuple[Side, Side]:
    """Both sides of every pair; numbers that any loss is finite at where a pair is not whole."""
    whole_P = batch.whole()
    tokens_B = (batch.labels_BT != batch.ignore).sum(1).clamp(min=1)
    reference_B = batch.columns.get(f"{REFERENCE}_B", torch.zeros_like(logp_B)).to(logp_B.dtype)
    chosen, rejected = (
        Side(torch.where(whole_P, logp_B[i::2], -1.0), torch.where(whole_P, reference_B[i::2], -1.0), tokens_B[i::2])
        for i in (0, 1)
    )
    return chosen, rejected


def _watched(chosen: Side, rejected: Side, reward_w: Tensor, reward_l: Tensor) -> dict[str, Tensor]:
    """What to watch besides the loss, a pair: a falling log-probability of the chosen answer is seen nowhere else."""
    return {
        "rewards/chosen": reward_w,
        "rewards/rejected": reward_l,
        "rewards/margin": reward_w - reward_l,
        "rewards/accuracy": wins(reward_w, reward_l),
        "logps/chosen": chosen.logp_P,
        "logps/rejected": rejected.logp_P,
        "tokens/chosen": chosen.tokens_P.to(reward_w.dtype),
        "tokens/rejected": rejected.tokens_P.to(reward_w.dtype),
    }


def wins(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """1 where the chosen side is ahead, 0 where it is behind, one half where they are level."""
    return 0.5 * (1 + torch.sign(chosen_P - rejected_P))
