"""Preference learning without a reward model: DPO and its family, one pure function per loss.

A pair has one prompt, a chosen and a rejected answer. Each answer gets a score, and the loss is a function of
h = score(chosen) - score(rejected). Log-probabilities are sums over the answer and its end of turn, without the prompt;
"per token" in the table marks the losses that use the mean instead. s is the logistic function and b is `beta`.

| loss | score | loss of h | source |
|---|---|---|---|
| sigmoid | ln p - ln p_reference | -ln s(b h); cDPO with `label_smoothing` | Rafailov et al. 2023, eq. 7 |
| robust | as sigmoid | unbiased if the fraction `label_smoothing` of labels is wrong | Chowdhury et al. 2024, eq. 12 |
| ipo | as sigmoid, per token | (h - 1 / 2b)^2 | Azar et al. 2023, eq. 17 |
| hinge | as sigmoid | max(0, 1 - b h) | Zhao et al. 2023 (SLiC) |
| simpo | ln p, per token | -ln s(b h - gamma) | Meng et al. 2024, eq. 6 |
| orpo | ln odds of p, per token | -b ln s(h), plus the NLL of the chosen answer | Hong et al. 2024, eq. 6 |
| cpo | ln p | -ln s(b h), plus the NLL of the chosen answer | Xu et al. 2024, eq. 5 |

The IPO paper uses sums, but its authors say that they divide by the length; `length_norm = false` selects sums. KTO
(Ethayarajh et al. 2024) has a loss per answer instead of one per pair.

The reference never changes, so its log-probabilities are a column of the data (`annotate`): computed once for all
epochs and stored in the stage's directory, or per step if the run does not see every row.

Shapes: B rows, T positions, P pairs; rows 2 i and 2 i + 1 are the chosen and the rejected answer of pair i.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.data.batches import Batch
from ingot.model.losses import token_logps
from ingot.objectives.settings import PreferenceSettings, UnpairedSettings
from ingot.train.divergences import log1mexp
from ingot.train.objective import Column, Context, Needs, Objective, Term

REFERENCE = "reference_logps"
"""The column of each answer's log-probability under the reference."""


@dataclass(frozen=True)
class Options:
    """Coefficients of the losses."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0


class Side(NamedTuple):
    """The chosen or the rejected answers of P pairs."""

    logp_P: Tensor
    """ln p of the complete answer."""
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
    """ln(p / (1 - p)) with ln p the mean log-probability per token; exact also for p near 1."""
    return mean(side) - log1mexp(mean(side))


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
    """ln p of each row's answer under the reference, [B] on the CPU, by its column name."""
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
"""Scores of the losses without a reference; the other losses use the ratio."""


def kto(
    ratio_B: Tensor, desirable_B: Tensor, kl_zero: Tensor, o: Options, desirable: float, undesirable: float
) -> Tensor:
    """Loss of each answer (KTO, eq. 8): 1 - s(b (ratio - kl_zero)) if desirable, 1 - s(b (kl_zero - ratio)) if not.

    Args:
        kl_zero: the paper's reference point z_0, an estimate of KL(policy || reference); it takes no gradient.
        desirable: weight of desirable answers.
        undesirable: weight of undesirable answers.
    """
    gain_B = o.beta * (ratio_B - kl_zero)
    return torch.where(desirable_B, desirable * torch.sigmoid(-gain_B), undesirable * torch.sigmoid(gain_B))


def answer_logps(out: Any, batch: Batch) -> Tensor:
    """ln p of each row's answer and its end of turn, [B]."""
    return token_logps(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore).sum(1)


def pair_term(batch: Batch, value_P: Tensor, **options: Any) -> Term:
    """The sum of a value over pairs of which both answers have labels."""
    return Term(torch.where(batch.complete_groups(), value_P, 0.0).sum(), "pair", **options)


class Preference(Objective):
    """Pairwise losses: every loss of the table in the module's docstring."""

    def __init__(self, settings: PreferenceSettings):
        loss = settings.loss
        self._loss = LOSSES[loss]
        by_token = loss == "ipo" if settings.length_norm is None else settings.length_norm
        self._score = SCORES.get(loss) or (mean_ratio if by_token else ratio)
        beta = settings.beta or (2.0 if loss == "simpo" else 0.1)
        self._options = Options(beta, settings.label_smoothing, settings.gamma)
        self._sft = float(loss in ("orpo", "cpo")) if settings.sft_weight is None else settings.sft_weight
        columns = () if loss in SCORES else (Column(REFERENCE),)
        self.needs = Needs(columns=columns, companions_after_annotate=not settings.releases_companions, dropout=False)

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return reference_logps(batch, ctx)

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        chosen, rejected = _sides(answer_logps(out, batch), batch)
        scores = self._score(chosen), self._score(rejected)

        terms = {"preference": pair_term(batch, self._loss(scores[0] - scores[1], self._options))}
        if self._sft:
            terms["sft"] = pair_term(batch, -mean(chosen), weight=self._sft, penalty=True)
        with torch.no_grad():
            metrics = _pair_metrics(chosen, rejected, *(self._options.beta * score for score in scores))
            return terms | {name: pair_term(batch, value_P, metric=True) for name, value_P in metrics.items()}


class Unpaired(Objective):
    """KTO: a loss per answer, desirable (chosen) or undesirable (rejected).

    The reference point is estimated by the mean ratio of answers that belong to another prompt of the same step,
    clamped to at least 0. It is 0 if all pairs of a step have one prompt.

    The paper recommends weights such that weight x number of desirable answers is 1 to 4/3 times that of the others.
    """

    needs = Needs(columns=(Column(REFERENCE),), dropout=False, whole_step=True)

    def __init__(self, settings: UnpairedSettings):
        self._options, self._weights = Options(settings.beta), (settings.desirable, settings.undesirable)

    def annotate(self, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return reference_logps(batch, ctx)

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        batch = self.annotated(batch, ctx)
        mismatched = mismatched_answers(batch, ctx.model.config.context)  # pyright: ignore
        kl_zero = 0.0
        if mismatched is not None:
            policy, reference = (
                ctx.over(model, mismatched, answer_logps) for model in (ctx.model, ctx.companions["reference"])
            )
            kl_zero = max(0.0, float((policy - reference).mean()))
        ctx.metrics["kl_zero"] = kl_zero
        yield replace(batch, columns={**batch.columns, "kl_zero_B": np.full(len(batch), kl_zero)})

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        logp_B = answer_logps(out, batch)
        labelled_B = (batch.labels_BT != batch.ignore).any(1)
        desirable_B = torch.arange(len(batch), device=logp_B.device) % batch.group == 0
        ratio_B = logp_B - batch.columns[f"{REFERENCE}_B"].to(logp_B.dtype)
        loss_B = kto(ratio_B, desirable_B, batch.columns["kl_zero_B"].to(logp_B.dtype), self._options, *self._weights)
        with torch.no_grad():
            sides = _sides(logp_B, batch)
            metrics = _pair_metrics(*sides, *(self._options.beta * ratio(side) for side in sides))
        return {
            "preference": Term(torch.where(labelled_B, loss_B, 0.0).sum(), "sequence"),
            **{name: pair_term(batch, value_P, metric=True) for name, value_P in metrics.items()},
        }


def mismatched_answers(batch: Batch, context: int) -> Batch | None:
    """Each prompt with an answer to another prompt: the same side of the next pair whose prompt differs.

    Rows are cut at `context`, since they are only evaluated. None if all rows have the same prompt.
    """
    label_BT, ids_BT = batch.labels_BT, batch.ids_BT
    first_B = (label_BT != batch.ignore).argmax(1)  # the last position of the prompt; its label begins the answer
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    matches = _rows_of_other_prompts(batch, first_B)
    for row, other in matches:
        end = batch.columns["lengths_B"][other]
        ids = np.concatenate([ids_BT[row, : first_B[row] + 1], ids_BT[other, first_B[other] + 1 : end]])
        labels = np.full(len(ids), batch.ignore)
        labels[first_B[row] :] = label_BT[other, first_B[other] : end]
        rows.append((ids[:context], labels[:context]))
    if not rows:
        return None
    prompt_rows = [row for row, _ in matches]
    width = max(len(ids) for ids, _ in rows)
    new_ids, new_labels = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), batch.ignore)
    for i, (ids, labels) in enumerate(rows):
        new_ids[i, : len(ids)], new_labels[i, : len(labels)] = ids, labels
    positions = np.broadcast_to(np.arange(width), new_ids.shape).copy()
    return Batch(
        new_ids, new_labels, positions, None, batch.source_B[prompt_rows], batch.row_B[prompt_rows], batch.ignore
    )


def _rows_of_other_prompts(batch: Batch, first_B: np.ndarray) -> list[tuple[int, int]]:
    """Each labelled row with the next row (cyclically) of the same side whose prompt, up to `first_B`, differs."""
    labelled = np.flatnonzero((batch.labels_BT != batch.ignore).any(1))
    prompts = {row: batch.ids_BT[row, : first_B[row] + 1].tobytes() for row in labelled}
    matches = []
    for side in range(batch.group):
        rows = [row for row in labelled if row % batch.group == side]
        for i, row in enumerate(rows):
            following = (*rows[i + 1 :], *rows[:i])
            other = next((o for o in following if prompts[o] != prompts[row]), None)
            if other is not None:
                matches.append((row, other))
    return sorted(matches)


def _sides(logp_B: Tensor, batch: Batch) -> tuple[Side, Side]:
    """Chosen and rejected answers of every pair; incomplete pairs get placeholders at which every loss is finite."""
    complete_P = batch.complete_groups()
    tokens_B = (batch.labels_BT != batch.ignore).sum(1).clamp(min=1)
    reference_B = batch.columns.get(f"{REFERENCE}_B", torch.zeros_like(logp_B)).to(logp_B.dtype)
    chosen, rejected = (
        Side(
            torch.where(complete_P, logp_B[i::2], -1.0),
            torch.where(complete_P, reference_B[i::2], -1.0),
            tokens_B[i::2],
        )
        for i in (0, 1)
    )
    return chosen, rejected


def _pair_metrics(chosen: Side, rejected: Side, reward_w_P: Tensor, reward_l_P: Tensor) -> dict[str, Tensor]:
    """Metrics of each pair; w marks the chosen answer (winner), l the rejected one (loser)."""
    return {
        "rewards/chosen": reward_w_P,
        "rewards/rejected": reward_l_P,
        "rewards/margin": reward_w_P - reward_l_P,
        "rewards/accuracy": wins(reward_w_P, reward_l_P),
        "logps/chosen": chosen.logp_P,
        "logps/rejected": rejected.logp_P,
        "tokens/chosen": chosen.tokens_P.to(reward_w_P.dtype),
        "tokens/rejected": rejected.tokens_P.to(reward_w_P.dtype),
    }


def wins(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """1 where the chosen side is larger, 0 where it is smaller, 0.5 where they are equal."""
    return 0.5 * (1 + torch.sign(chosen_P - rejected_P))
