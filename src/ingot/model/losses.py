"""Functions of hidden states and a head that objectives are made of: log-probabilities, cross-entropy, divergences.

Logits are the largest tensor of training (64 rows x 1,024 x 50,257 in fp32 are 13 GB) and only one number per position
is kept of them. So positions without a label are dropped first, which makes their loss and gradient exactly 0, and the
others are processed in chunks of at most `MAX_LOGITS` elements. Losses that need only the labels' probabilities use
`LMHead.nll`, which keeps one copy of the logits; for others with more than one chunk, logits are computed again in the
backward pass.

Shapes: B rows, T positions, M = B T, N labelled positions, D features, V vocabulary, K numbers of a position.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ingot.model.lm_head import LMHead, chunk_size
from ingot.model.precision import at_least_fp32

IGNORE = -100
_SIZES = 16
"""Labelled positions are rounded up to a multiple of M / 16, so that few sizes of memory blocks occur."""


def cross_entropy(
    hidden_BTD: Tensor, head: LMHead, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over labelled positions of -ln p(label), in nats, and their number. Never a mean: the engine divides.

    Args:
        hidden_BTD: hidden states, already aligned with the labels (the shift happens in `data`).
        labels_BT: ids, `ignore` where there is nothing to predict.
        max_logits: elements of logits held at once; None: the device's default.

    Returns:
        The sum in fp32 (fp64 for an fp64 model; 0 with zero gradients where all is ignored) and the count, int64.
    """
    logp_BT = token_logps(hidden_BTD, head, labels_BT, ignore=ignore, max_logits=max_logits)
    return -logp_BT.sum(), (labels_BT != ignore).sum()


def cross_entropy_terms(
    hidden_BTD: Tensor, head: LMHead, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of regularised losses, summed over labelled positions, from one pass over the logits.

    Returns:
        -ln p(label), equal to `cross_entropy`'s; the mean over the vocabulary of -ln p, for label smoothing (Szegedy et
        al. 2016, arXiv:1512.00567, section 7); and ln(Z)^2 with Z the sum of exp(logits), for the z-loss (Chowdhery et
        al. 2022, PaLM, arXiv:2204.02311, section 5).
    """

    def terms(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = at_least_fp32(logits_nV)
        log_z_n = logits_nV.logsumexp(-1)
        nll_n = F.cross_entropy(logits_nV, labels_n, reduction="none")
        return torch.stack([nll_n, log_z_n - logits_nV.mean(-1), log_z_n.square()], dim=-1)

    measure = _in_chunks(terms, head, max_logits)
    nll, uniform, z_squared = _where_labelled(measure, hidden_BTD, labels_BT, labels_BT, ignore)
    return nll.sum(), uniform.sum(), z_squared.sum()


def token_logps(
    hidden_BTD: Tensor,
    head: LMHead,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> Tensor:
    """ln p(label) at every position, B x T, 0 where the label is `ignore`; the softmax is in fp32 or better."""

    def logps(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        return -head.nll(hidden_ND, labels_N, max_logits)[:, None]

    def at_temperature(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        return -F.cross_entropy(at_least_fp32(logits_nV) / temperature, labels_n, reduction="none")[:, None]

    measure = logps if temperature == 1.0 else _in_chunks(at_temperature, head, max_logits)
    return _where_labelled(measure, hidden_BTD, labels_BT, labels_BT, ignore)[0]


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
    """KL(reference || model) of the next token at every labelled position, B x T in nats, 0 elsewhere.

    The sum is over the full vocabulary, so it is exact, never negative, and smooth where the two agree. No gradient
    reaches the reference (hidden states ... x D', any width, of the same rows). Ids that only one of the two has, such
    as the padding of an embedding, are left out.
    """
    vocab = min(len(head.weight), len(reference_head.weight))

    def divergence(logits_nV: Tensor, reference_nD: Tensor) -> Tensor:
        with torch.no_grad():
            expected_nV = at_least_fp32(reference_head(reference_nD)[:, :vocab]).log_softmax(-1)
        logp_nV = at_least_fp32(logits_nV[:, :vocab]).log_softmax(-1)
        return F.kl_div(logp_nV, expected_nV, reduction="none", log_target=True).sum(-1, keepdim=True)

    measure = _in_chunks(divergence, head, max_logits)
    return _where_labelled(measure, hidden_BTD, reference_BTD, labels_BT, ignore)[0]


def token_logps_and_entropies(
    hidden_BTD: Tensor,
    head: LMHead,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps`, and the entropy in nats of the distribution that each label is drawn from, both B x T."""

    def logps_and_entropies(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logp_nV = F.log_softmax(at_least_fp32(logits_nV) / temperature, dim=-1)
        chosen_n1 = logp_nV.gather(1, labels_n[:, None])
        return torch.cat((chosen_n1, -(logp_nV.exp() * logp_nV).sum(1, keepdim=True)), dim=1)

    measure = _in_chunks(logps_and_entropies, head, max_logits)
    logp_BT, entropy_BT = _where_labelled(measure, hidden_BTD, labels_BT, labels_BT, ignore)
    return logp_BT, entropy_BT


def random_scores(hidden_ND: Tensor, head: LMHead, key: int) -> Tensor:
    """N numbers whose gradients with respect to the logits are random, of mean zero and covariance diag(p) - p p'.

    That is the covariance of d ln p(y) for y drawn from p, so the mean of their squared gradients is the Fisher
    information; but every token contributes to each: s = sqrt(p) z - p (sqrt(p) . z) with random signs z, since with
    S = diag(sqrt p) (I - sqrt(p) sqrt(p)') the covariance diag(p) - p p' is S S'. The signs follow from `key`.
    """

    def scores(logits_nV: Tensor, index_n: Tensor) -> Tensor:
        logits_nV = at_least_fp32(logits_nV)
        with torch.no_grad():
            first = int(index_n[0]) if len(index_n) else 0
            generator = torch.Generator(logits_nV.device).manual_seed((key + first) % 2**63)
            signs_nV = torch.randint(2, logits_nV.shape, generator=generator, device=logits_nV.device) * 2 - 1
            p_nV = logits_nV.softmax(-1)
            root_nV = p_nV.sqrt() * signs_nV
            s_nV = root_nV - p_nV * root_nV.sum(-1, keepdim=True)
        return (logits_nV * s_nV).sum(-1)

    index_N = torch.arange(len(hidden_ND), device=hidden_ND.device)
    return _in_chunks(scores, head, None)(hidden_ND, index_N)


def _where_labelled(
    measure: Callable[[Tensor, Tensor], Tensor],
    hidden_BTD: Tensor,
    beside_BT: Tensor,
    labels_BT: Tensor,
    ignore: int,
) -> tuple[Tensor, ...]:
    """`measure` (hidden states N x D and what lies beside them, N ..., to N x K) at labelled positions.

    The number of labelled positions differs from batch to batch, and memory blocks of ever-different sizes fragment a
    heap. So it is rounded up to a multiple of M / 16 by repeating the last position.

    Returns:
        K tensors B x T, 0 at positions without a label.
    """
    M = labels_BT.numel()
    hidden_MD, beside_M = hidden_BTD.reshape(M, -1), beside_BT.reshape(M, *beside_BT.shape[2:])
    # A batch keeps its labels on the host too, since reading a number from a GPU waits for all its work.
    host_labels_BT = getattr(labels_BT, "on_host", labels_BT)
    index_N = (host_labels_BT.reshape(M) != ignore).nonzero().squeeze(1)
    N = len(index_N)
    if N == M:
        return measure(hidden_MD, beside_M).view(*labels_BT.shape, -1).unbind(-1)
    index_N = index_N.to(labels_BT.device, non_blocking=True)
    multiple = -(-M // _SIZES)
    index_P = torch.cat((index_N, index_N[-1:].expand(-N % multiple))) if N else index_N
    measured_NK = measure(hidden_MD[index_P], beside_M[index_P])[:N]
    measured_MK = measured_NK.new_zeros(M, measured_NK.shape[1]).index_put((index_N,), measured_NK)
    return measured_MK.view(*labels_BT.shape, -1).unbind(-1)


def _in_chunks(
    measure: Callable[[Tensor, Tensor], Tensor], head: LMHead, max_logits: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of hidden states from one of logits, which are computed a chunk at a time.

    Args:
        measure: (logits n x V, what lies beside each position, n ...) to n or n x K numbers.
        max_logits: elements of a chunk's logits.
    """

    def of_hidden(hidden_nD: Tensor, beside_n: Tensor) -> Tensor:
        return measure(head(hidden_nD), beside_n)

    def chunked(hidden_ND: Tensor, beside_N: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled()
        size = chunk_size(len(head.weight), hidden_ND.device, max_logits, needs_grad)
        if len(beside_N) <= size:
            return of_hidden(hidden_ND, beside_N)
        parts = []
        for h_nD, b_n in zip(hidden_ND.split(size), beside_N.split(size), strict=True):
            if needs_grad:  # the head draws no random numbers, so none need to be replayed
                parts.append(checkpoint(of_hidden, h_nD, b_n, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(of_hidden(h_nD, b_n))
        return torch.cat(parts)

    return chunked
