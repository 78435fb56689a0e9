"""Divergences between the next-token distributions of a teacher and a student, for distillation and the KL penalty.

The loss of a position is T^2 D(p, q), with p and q the softmax of the teacher's and the student's logits divided by the
temperature T (Hinton et al. 2015, arXiv:1503.02531). T^2 keeps the size of the gradient, which falls with 1 / T^2.

| name | D(p, q) | source |
|---|---|---|
| forward | KL(p, q), the teacher first: covers all that the teacher considers likely | Hinton et al. 2015 |
| reverse | KL(q, p): avoids what the teacher considers unlikely | Gu et al. 2023, arXiv:2306.08543 |
| jsd | beta KL(p, m) + (1 - beta) KL(q, m) | Agarwal et al. 2023, arXiv:2306.13649, eq. 1 |
| skew | KL(p, m) | Ko et al. 2024, arXiv:2402.03898, eq. 5 |

m = beta p + (1 - beta) q is a mixture: beta is the weight of the teacher in it. For jsd that is the convention of TRL.

The teacher is a model that runs beside the student (`LiveTeacher`), or its predictions are stored: its k most likely
tokens and the probability of all others together, the tail (`StoredTeacher`). Both distributions then have k + 1
buckets, of which the last one is the tail. Merging tokens to a bucket never increases a divergence, and with k = V - 1
nothing is merged. The student's tail is the exact probability of the other tokens. Renormalising the k tokens instead
would teach the student that no other token ever occurs.

Shapes: B rows, T positions, n positions of a chunk, D features, V vocabulary, k stored tokens, K = V or k + 1 outcomes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.config import SOFTMAX_CHUNK
from ingot.model.lm_head import LMHead
from ingot.model.losses import IGNORE, at_labels, chunked
from ingot.model.precision import at_least_fp32

# -- divergences of log-probabilities ----------------------------------------------------------------------------------


def kl(logp_nK: Tensor, logq_nK: Tensor) -> Tensor:
    """KL(p, q) in nats of every position, n: the sum over outcomes of p (ln p - ln q)."""
    return F.kl_div(logq_nK, logp_nK, reduction="none", log_target=True).sum(-1)


def forward_kl(teacher_nK: Tensor, student_nK: Tensor, beta: float) -> Tensor:
    return kl(teacher_nK, student_nK)


def reverse_kl(teacher_nK: Tensor, student_nK: Tensor, beta: float) -> Tensor:
    return kl(student_nK, teacher_nK)


def jensen_shannon(teacher_nK: Tensor, student_nK: Tensor, beta: float) -> Tensor:
    mixture_nK = _mixture(teacher_nK, student_nK, beta)
    return beta * kl(teacher_nK, mixture_nK) + (1 - beta) * kl(student_nK, mixture_nK)


def skew_kl(teacher_nK: Tensor, student_nK: Tensor, beta: float) -> Tensor:
    return kl(teacher_nK, _mixture(teacher_nK, student_nK, beta))


def _mixture(teacher_nK: Tensor, student_nK: Tensor, beta: float) -> Tensor:
    """ln(beta p + (1 - beta) q)."""
    return torch.logaddexp(teacher_nK + math.log(beta), student_nK + math.log1p(-beta))


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jsd": jensen_shannon,
    "skew": skew_kl,
}
"""Name -> function(ln p of the teacher, ln q of the student, both n x K, beta) to n values in nats."""


@dataclass(frozen=True)
class Divergence:
    """A divergence with its options."""

    name: str = "forward"
    temperature: float = 1.0
    beta: float = 0.5
    """Weight of the teacher in the mixture of jsd and skew, between 0 and 1."""
    vocab: int | None = None
    """Ids from this one on are padding of a head, left out before the softmax; None: those that only one of the two
    models has."""

    def __call__(self, teacher_nK: Tensor, student_nK: Tensor) -> Tensor:
        """T^2 D(p, q) of log-probabilities at the temperature."""
        values_n = DIVERGENCES[self.name](teacher_nK, student_nK, self.beta)
        return values_n if self.temperature == 1.0 else values_n * self.temperature**2

    def scaled(self, logits_nV: Tensor) -> Tensor:
        """Logits divided by the temperature, at least fp32."""
        logits_nV = at_least_fp32(logits_nV)
        return logits_nV if self.temperature == 1.0 else logits_nV / self.temperature


# -- teachers ----------------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """The predictions of a teacher for some positions, at the temperature of a divergence."""

    teacher_nK: Tensor
    """ln p of each outcome."""
    ids_nk: Tensor | None
    """The ids of the first k outcomes; the last one is the tail. None: the outcomes are all ids."""


class Teacher(Protocol):
    """The predictions of a teacher for the positions of a batch."""

    @property
    def values_BT(self) -> tuple[Tensor, ...]:
        """What the predictions of each position follow from, B x T x ... each."""
        ...

    def vocab(self, student: int) -> int:
        """Ids that both models have, by the ids of the student's head."""
        ...

    def outputs(self, *values_n: Tensor) -> tuple[Tensor, ...]:
        """What `targets` needs of a chunk's positions, of which some rows can be taken at a time."""
        ...

    def targets(self, outputs_n: tuple[Tensor, ...], d: Divergence, vocab: int) -> Targets:
        """The predictions among the first `vocab` ids."""
        ...


@dataclass(frozen=True)
class LiveTeacher:
    """A model that ran over the same rows. Its logits are computed a chunk at a time, beside the student's."""

    hidden_BTD: Tensor
    """Its width may differ from the student's."""
    head: LMHead

    @property
    def values_BT(self) -> tuple[Tensor, ...]:
        return (self.hidden_BTD,)

    def vocab(self, student: int) -> int:
        return min(student, len(self.head.weight))

    @torch.no_grad()
    def outputs(self, *values_n: Tensor) -> tuple[Tensor, ...]:
        return (self.head(values_n[0]),)

    @torch.no_grad()
    def targets(self, outputs_n: tuple[Tensor, ...], d: Divergence, vocab: int) -> Targets:
        return Targets(d.scaled(outputs_n[0][:, :vocab]).log_softmax(-1), None)


@dataclass(frozen=True)
class StoredTeacher:
    """The k largest logits of a teacher, and the logarithm of its tail at the temperature of the divergence."""

    ids_BTk: Tensor
    """int64, distinct."""
    logits_BTk: Tensor
    """Up to a constant per position."""
    log_tail_BT: Tensor
    """ln of the probability of all other ids, computed before the logits were rounded."""

    @property
    def values_BT(self) -> tuple[Tensor, ...]:
        return self.ids_BTk, self.logits_BTk, self.log_tail_BT

    def vocab(self, student: int) -> int:
        return student

    def outputs(self, *values_n: Tensor) -> tuple[Tensor, ...]:
        return values_n

    @torch.no_grad()
    def targets(self, outputs_n: tuple[Tensor, ...], d: Divergence, vocab: int) -> Targets:
        ids_nk, logits_nk, log_tail_n = outputs_n
        log_tail_n1 = at_least_fp32(log_tail_n)[:, None]
        # Renormalising to 1 - tail makes the tail exact, although the logits are rounded.
        head_nk = d.scaled(logits_nk).log_softmax(-1) + log1mexp(log_tail_n1)
        return Targets(torch.cat((head_nk, log_tail_n1), -1), ids_nk)


def buckets(logits_nV: Tensor, ids_nk: Tensor) -> Tensor:
    """Log-probabilities of k ids and, last, of all others together, n x (k + 1); k < V.

    The last one is a sum over the others, because 1 - (the sum over the k ids) is 0 in fp32 if they are likely.
    """
    return _merged(logits_nV, ids_nk)[0] - logits_nV.logsumexp(-1, keepdim=True)


def _merged(logits_nV: Tensor, ids_nk: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of k ids and of all others together, n x (k + 1); and the fraction of each id in the latter, n x V."""
    rest_nV = logits_nV.scatter(1, ids_nk, -math.inf)
    largest_n1 = rest_nV.amax(-1, keepdim=True)
    fraction_nV = rest_nV.sub_(largest_n1).exp_()
    total_n1 = fraction_nV.sum(-1, keepdim=True)
    return torch.cat((logits_nV.gather(1, ids_nk), total_n1.log() + largest_n1), -1), fraction_nV.div_(total_n1)


def log1mexp(x: Tensor) -> Tensor:
    """ln(1 - e^x) for x < 0 (Maechler 2012): by expm1 near 0, where 1 - e^x cancels, and by log1p elsewhere."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near_0 = x > -math.log(2)
    # `where` also differentiates the branch that is not selected, so each branch gets arguments with finite gradients.
    by_expm1 = torch.log(-torch.expm1(torch.where(near_0, x, -1.0)))
    return torch.where(near_0, by_expm1, torch.log1p(-torch.exp(torch.where(near_0, -1.0, x))))


def most_likely(logits_nV: Tensor, k: int, temperatures: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """What is stored of a teacher (`StoredTeacher`).

    Args:
        logits_nV: its logits, without padding of the vocabulary, more than k.

    Returns:
        The ids of the k largest logits, n x k, the largest first; these logits minus the largest one, in fp16, whose
        steps are then smallest where the probability is largest; ln of the tail at each temperature, n x len.
    """
    logits_nV = at_least_fp32(logits_nV)
    top_nk, ids_nk = logits_nV.topk(k, -1)
    rest_nV = logits_nV.scatter(1, ids_nk, -math.inf)
    log_tails = [(rest_nV / t).logsumexp(-1) - (logits_nV / t).logsumexp(-1) for t in temperatures]
    smallest = torch.finfo(torch.float16).min
    return ids_nk, (top_nk - top_nk[:, :1]).clamp(min=smallest).half(), torch.stack(log_tails, -1)


# -- losses ------------------------------------------------------------------------------------------------------------


def distillation_terms(
    hidden_BTD: Tensor,
    head: LMHead,
    labels_BT: Tensor,
    teacher: Teacher,
    divergence: Divergence,
    alpha: float,
    *,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """alpha (-ln p(label)) + (1 - alpha) T^2 D(teacher, student), from one pass over the logits.

    No gradient reaches the teacher.

    Args:
        hidden_BTD: the student's hidden states, aligned with the labels.
        teacher: its predictions, aligned with the labels as well.
        max_logits: elements of a chunk's logits; None: the device's default.

    Returns:
        The loss of each position, and without gradients its parts -ln p(label) and T^2 D, all in nats, B x T, 0 without
        a label. No mean: the engine divides. `F.kl_div` with `reduction="batchmean"` divides a B x T x V tensor by B,
        so that a row counts T times as much as it should.
    """
    width = len(head.weight)
    vocab = min(teacher.vocab(width), divergence.vocab or width)
    chunk = head.distillation_chunk(teacher, divergence, alpha, vocab)
    if chunk is None:
        head, chunk = LMHead(head.weight), partial(_chunk, teacher, width, vocab, divergence, alpha)
    values_BT = labels_BT, *teacher.values_BT
    function = partial(head.fused, chunk, max_logits=max_logits)
    loss_BT, nll_BT, divergence_BT = at_labels(function, hidden_BTD, labels_BT, ignore, *values_BT)
    return loss_BT, nll_BT.detach(), divergence_BT.detach()


def _chunk(
    teacher: Teacher,
    width: int,
    vocab: int,
    d: Divergence,
    alpha: float,
    x_nD: Tensor,
    weight_PD: Tensor,
    labels_n: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """The loss, -ln p(label) and T^2 D, n x 3, and the gradient of the loss by the logits, for `LMHead.fused`.

    A few rows at a time, because a step on a CPU takes as long as its passes over n x V numbers.

    Args:
        rest: the teacher's values of each position, and whether the gradient is needed.
    """
    *values_n, needs_grad = rest
    outputs_n = teacher.outputs(*values_n)
    logits_nP, results = x_nD @ weight_PD.T, []
    size = max(1, SOFTMAX_CHUNK[logits_nP.device.type] // width)
    for start in range(0, max(1, len(labels_n)), size):
        row = slice(start, start + size)
        targets = teacher.targets(tuple(x[row] for x in outputs_n), d, vocab)
        nll_n, divergence_n, grad_nV = _terms(logits_nP[row, :width], labels_n[row], targets, vocab, d, alpha)
        results.append(torch.stack((alpha * nll_n + (1 - alpha) * divergence_n, nll_n, divergence_n), -1))
        if needs_grad:
            logits_nP[row, :width] = grad_nV
            logits_nP[row, width:] = 0.0
    return torch.cat(results), logits_nP


def _terms(
    logits_nV: Tensor,
    labels_n: Tensor,
    targets: Targets,
    vocab: int,
    d: Divergence,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-ln p(label) and T^2 D, n each, and the gradient of the loss, n x V."""
    one_softmax = d.temperature == 1.0 and vocab == logits_nV.shape[1]
    scaled_nv, ids_nk = d.scaled(logits_nV[:, :vocab]), targets.ids_nk
    labels_n1 = labels_n[:, None]
    if ids_nk is None:
        logq_nv = scaled_nv.log_softmax(-1)
        nll_n1 = -logq_nv.gather(1, labels_n1) if one_softmax else None
        divergence_n, grad_nv = outcome_gradient(targets.teacher_nK, logq_nv, d, alpha, one_softmax)
    else:
        outcomes_nK, fraction_nv = _merged(scaled_nv, ids_nk)
        log_z_n1 = outcomes_nK.logsumexp(-1, keepdim=True)
        nll_n1 = log_z_n1 - scaled_nv.gather(1, labels_n1) if one_softmax else None
        divergence_n, r_nK = outcome_gradient(targets.teacher_nK, outcomes_nK - log_z_n1, d, alpha, one_softmax)
        grad_nv = fraction_nv.mul_(r_nK[:, -1:]).scatter_(1, ids_nk, r_nK[:, :-1])
    if nll_n1 is not None:
        grad_nV = grad_nv
    else:
        logp_nV = at_least_fp32(logits_nV).log_softmax(-1)
        nll_n1 = -logp_nV.gather(1, labels_n1)
        grad_nV = logp_nV.exp_().mul_(alpha)
        grad_nV[:, :vocab] += grad_nv
    grad_nV.scatter_add_(1, labels_n1, grad_nV.new_full(labels_n1.shape, -alpha))
    return nll_n1[:, 0], divergence_n, grad_nV


def outcome_gradient(
    teacher_nK: Tensor, logq_nK: Tensor, d: Divergence, alpha: float, one_softmax: bool
) -> tuple[Tensor, Tensor]:
    """The divergence and its gradient, by outcomes.

    The derivative r of D with respect to ln q needs only the outcomes. With R the sum of r, the gradient of the scaled
    logits is r - R q at an id that is an outcome, and (r_tail - R q_tail) w at one in the tail, of which w is the
    fraction.

    Args:
        teacher_nK: ln p of each outcome.
        logq_nK: the student's ln q at the temperature, overwritten.
        one_softmax: whether the labels' softmax has the same outcomes, so that alpha q can be added here.

    Returns:
        T^2 D, n; and the gradient of the loss by the unscaled logits of each outcome, n x K, without the labels'
        own -alpha.
    """
    weight, of_labels = (1 - alpha) / d.temperature, alpha * one_softmax
    if d.name == "forward":  # r = -T^2 p and R = -T^2: as few passes over n x V numbers as possible
        p_nK = teacher_nK.exp()
        values_n = torch.linalg.vecdot(p_nK, teacher_nK - logq_nK) * d.temperature**2
        weight *= d.temperature**2
        return values_n, logq_nK.exp_().mul_(weight + of_labels).sub_(p_nK, alpha=weight)
    with torch.enable_grad():
        leaf_nK = logq_nK.detach().requires_grad_()
        values_n = d(teacher_nK, leaf_nK)
        (r_nK,) = torch.autograd.grad(values_n.sum(), leaf_nK)
    q_nK = logq_nK.exp_()
    r_nK.sub_(q_nK * r_nK.sum(-1, keepdim=True)).mul_(weight)
    return values_n.detach(), r_nK.add_(q_nK, alpha=of_labels)


def kl_divergence(
    hidden_BTD: Tensor,
    head: LMHead,
    reference_BTD: Tensor,
    reference_head: LMHead,
    labels_BT: Tensor,
    *,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> Tensor:
    """KL(reference, model) of the next token at every labelled position, B x T in nats, 0 elsewhere.

    The sum over the full vocabulary makes it exact and never negative. No gradient reaches the reference. Ids that only
    one of the two models has, such as padding of an embedding, are ignored.

    Args:
        reference_BTD: hidden states of the reference for the same rows; their width may differ from the model's.
    """
    teacher, forward = LiveTeacher(reference_BTD, reference_head), Divergence()
    vocab = teacher.vocab(len(head.weight))

    def divergence(logits_nV: Tensor, *values_n: Tensor) -> Tensor:
        student_nV = at_least_fp32(logits_nV[:, :vocab]).log_softmax(-1)
        return forward(teacher.targets(teacher.outputs(*values_n), forward, vocab).teacher_nK, student_nV)[:, None]

    return at_labels(chunked(divergence, head, max_logits), hidden_BTD, labels_BT, ignore, *teacher.values_BT)[0]
