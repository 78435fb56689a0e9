"""Building blocks of losses, as functions of hidden states and a head: log-probabilities and cross-entropy.

Logits are the largest tensor of training (64 rows x 1,024 x 50,257 in fp32 take 13 GB), and a loss needs only a few
numbers per position. So positions without a label are dropped first, which makes their loss and gradient exactly 0, and
the others are processed in chunks of at most `MAX_LOGITS` logits. Losses of the labels' log-probabilities alone use
`LMHead.nll`. The others recompute the logits of each chunk in the backward pass if there is more than one.

Shapes: B rows, T positions, M = B T, N labelled positions, n positions of a chunk, D features, V vocabulary, K values
per position.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ingot.model.lm_head import LMHead, chunk_size
from ingot.model.precision import at_least_fp32

IGNORE = -100
_PADDED_SIZES = 16
"""The number of labelled positions is padded to a multiple of M / 16, so that few distinct tensor sizes occur."""


def cross_entropy(
    hidden_BTD: Tensor, head: LMHead, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of -ln p(label) over labelled positions, in nats, and their number. Not a mean: the engine divides.

    Args:
        hidden_BTD: hidden states, aligned with the labels (`data` shifts them).
        labels_BT: ids to predict, `ignore` at positions without a label.
        max_logits: elements of a chunk's logits; None: the device's default.

    Returns:
        The sum in fp32 (fp64 for an fp64 model; 0 with zero gradients if there is no label) and the count, int64.
    """
    logp_BT = token_logps(hidden_BTD, head, labels_BT, ignore=ignore, max_logits=max_logits)
    return -logp_BT.sum(), (labels_BT != ignore).sum()


def cross_entropy_terms(
    hidden_BTD: Tensor, head: LMHead, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of a regularised cross-entropy, summed over labelled positions, from one pass over the logits.

    Returns:
        -ln p(label), as in `cross_entropy`; the mean of -ln p over the vocabulary, for label smoothing (Szegedy et al.
        2016, arXiv:1512.00567, section 7); and ln(Z)^2 with Z the sum of exp(logits), for the z-loss (Chowdhery et al.
        2022, PaLM, arXiv:2204.02311, section 5).
    """

    def terms(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = at_least_fp32(logits_nV)
        log_z_n = logits_nV.logsumexp(-1)
        nll_n = F.cross_entropy(logits_nV, labels_n, reduction="none")
        return torch.stack([nll_n, log_z_n - logits_nV.mean(-1), log_z_n.square()], dim=-1)

    nll, uniform, z_squared = at_labels(chunked(terms, head, max_logits), hidden_BTD, labels_BT, ignore, labels_BT)
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
    """ln p(label) at every position, B x T, 0 where the label is `ignore`. The softmax is at least fp32."""

    def logps(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        return -head.nll(hidden_ND, labels_N, max_logits)[:, None]

    def at_temperature(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        return -F.cross_entropy(at_least_fp32(logits_nV) / temperature, labels_n, reduction="none")[:, None]

    function = logps if temperature == 1.0 else chunked(at_temperature, head, max_logits)
    return at_labels(function, hidden_BTD, labels_BT, ignore, labels_BT)[0]


def token_logps_and_entropies(
    hidden_BTD: Tensor,
    head: LMHead,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps`, and the entropy in nats of the predicted distribution at the same temperature, both B x T."""

    def logps_and_entropies(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logp_nV = F.log_softmax(at_least_fp32(logits_nV) / temperature, dim=-1)
        label_logp_n1 = logp_nV.gather(1, labels_n[:, None])
        return torch.cat((label_logp_n1, -(logp_nV.exp() * logp_nV).sum(1, keepdim=True)), dim=1)

    function = chunked(logps_and_entropies, head, max_logits)
    logp_BT, entropy_BT = at_labels(function, hidden_BTD, labels_BT, ignore, labels_BT)
    return logp_BT, entropy_BT


def random_scores(hidden_ND: Tensor, head: LMHead, key: int) -> Tensor:
    """Random scalars, N, whose squared gradients estimate the Fisher information (`evaluate/fisher.py`).

    The gradient of each with respect to the logits is random, with mean zero and covariance diag(p) - p p', which is
    the covariance of the gradient of ln p(y) for y drawn from p. It is s = sqrt(p) z - p (sqrt(p) . z) with random
    signs z, because diag(p) - p p' = S S' with S = diag(sqrt p) (I - sqrt(p) sqrt(p)'). Unlike with a sampled y, every
    token of the vocabulary contributes to each estimate. The signs are a function of `key`.
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
    return chunked(scores, head, None)(hidden_ND, index_N)


def at_labels(
    function: Callable[..., Tensor], hidden_BTD: Tensor, labels_BT: Tensor, ignore: int, *aux_BT: Tensor
) -> tuple[Tensor, ...]:
    """Apply a function to the labelled positions only.

    The number of labelled positions differs from batch to batch, and tensors of ever-different sizes fragment the heap.
    So it is padded to a multiple of M / 16 by repeating the last position.

    Args:
        function: (hidden states N x D, auxiliary values N x ... each) to N x K.
        aux_BT: auxiliary values of each position, B x T x ..., such as the labels.

    Returns:
        K tensors B x T, 0 at positions without a label.
    """
    M = labels_BT.numel()
    values_M = [x.reshape(M, *x.shape[2:]) for x in (hidden_BTD, *aux_BT)]
    # A batch has a copy of its labels on the host, because reading a number from a GPU waits for all its work.
    host_labels_BT = getattr(labels_BT, "on_host", labels_BT)
    index_N = (host_labels_BT.reshape(M) != ignore).nonzero().squeeze(1)
    N = len(index_N)
    if N == M:
        return function(*values_M).view(*labels_BT.shape, -1).unbind(-1)
    index_N = index_N.to(labels_BT.device, non_blocking=True)
    multiple = -(-M // _PADDED_SIZES)
    index_P = torch.cat((index_N, index_N[-1:].expand(-N % multiple))) if N else index_N
    out_NK = function(*(x_M[index_P] for x_M in values_M))[:N]
    out_MK = out_NK.new_zeros(M, out_NK.shape[1]).index_put((index_N,), out_NK)
    return out_MK.view(*labels_BT.shape, -1).unbind(-1)


def chunked(function: Callable[..., Tensor], head: LMHead, max_logits: int | None) -> Callable[..., Tensor]:
    """Turn a function of logits into one of hidden states that computes the logits a chunk at a time.

    Args:
        function: (logits n x V, auxiliary values n x ... each) to n or n x K values.
        max_logits: elements of a chunk's logits; None: the device's default.
    """

    def of_hidden(hidden_nD: Tensor, *aux_n: Tensor) -> Tensor:
        return function(head(hidden_nD), *aux_n)

    def of_chunks(*values_N: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled()
        size = chunk_size(len(head.weight), values_N[0].device, max_logits, needs_grad)
        if len(values_N[0]) <= size:
            return of_hidden(*values_N)
        chunks = []
        for values_n in zip(*(x_N.split(size) for x_N in values_N), strict=True):
            if needs_grad:  # the head draws no random numbers, so no generator state is saved
                chunks.append(checkpoint(of_hidden, *values_n, use_reentrant=False, preserve_rng_state=False))
            else:
                chunks.append(of_hidden(*values_n))
        return torch.cat(chunks)

    return of_chunks
