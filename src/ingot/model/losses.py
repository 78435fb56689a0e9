"""What objectives do with hidden states and a head: log-probabilities and cross-entropy, a chunk at a time.

Logits are the largest tensor of training (64 rows x 1,024 x 50,257 in fp32 are 13 GB), and only one number per position
is kept of them. So positions without a label are dropped first (they then contribute exactly nothing, to the loss or to
a gradient), and the rest is cut into chunks of at most `MAX_LOGITS` elements. Where a loss needs labels' probabilities
alone, as nearly all do, `head.nll` keeps one copy of the logits; for others, where there is more than one chunk, logits
are computed again in the backward pass instead of kept. One chunk costs nothing extra.

Rejected: masking instead of dropping (prompts and padding would pay for the head).

Shapes: B rows, T positions, N labelled positions, D features, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ingot.model.lm_head import Head, chunk, wide

IGNORE = -100
_SIZES = 16
"""In how many sizes labelled positions come."""


def cross_entropy(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over labelled positions of -ln p(label), in nats, and their number: never a mean, the engine divides.

    Args:
        hidden_BTD: hidden states, already aligned with the labels (the shift happens in `data`).
        head: ... x D to ... x V.
        labels_BT: ids, `ignore` where there is nothing to predict.
        max_logits: elements of logits held at once; None: what suits the device.

    Returns:
        The sum, fp32 (fp64 for an fp64 model; 0 with zero gradients where all is ignored), and the count, int64.
    """
    logp_BT = token_logps(hidden_BTD, head, labels_BT, ignore=ignore, max_logits=max_logits)
    return -logp_BT.sum(), (labels_BT != ignore).sum()


def cross_entropy_parts(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What regularised losses are made of, summed over labelled positions, from one pass over the logits.

    Returns:
        -ln p(label), equal to `cross_entropy`'s; the mean over the vocabulary of -ln p, which label smoothing mixes in
        (Szegedy et al. 2016, arXiv:1512.00567, section 7); and ln(Z)^2, Z the sum of exp(logits), whose penalty keeps
        logits from drifting (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5).
    """

    def parts(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = wide(logits_nV)
        z_n = logits_nV.logsumexp(-1)
        nll_n = F.cross_entropy(logits_nV, labels_n, reduction="none")
        return torch.stack([nll_n, z_n - logits_nV.mean(-1), z_n.square()], dim=-1)

    of_label, uniform, z_squared = _where_labelled(
        _in_chunks(parts, head, max_logits), hidden_BTD, labels_BT, labels_BT, ignore
    )
    return of_label.sum(), uniform.sum(), z_squared.sum()


def token_logps(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> Tensor:
    """ln p(label) at every position, B x T, 0 where the label is `ignore`; the softmax is in fp32 or better."""

    def logps(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        return -head.nll(hidden_ND, labels_N, max_logits)[:, None]

    def sharpened(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        return -F.cross_entropy(wide(logits_nV) / temperature, labels_n, reduction="none")[:, None]

    measure = logps if temperature == 1.0 else _in_chunks(sharpened, head, max_logits)
    return _where_labelled(measure, hidden_BTD, labels_BT, labels_BT, ignore)[0]


def divergences(
    hidden_BTD: Tensor,
    head: Head,
    reference_BTD: Tensor,
    reference_head: Head,
    labels_BT: Tensor,
    *,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> Tensor:
    """KL(reference || model) of the next token at every labelled position, B x T in nats, 0 elsewhere.

    The whole vocabulary is summed, so it is exact, never negative, and smooth where the two agree; no gradient reaches
    the reference (hidden states ... x D', any width, of the same rows). Ids that only one of the two has, as a table
    that is filled up to a round number, are left out.
    """
    vocab = min(len(head.weight), len(reference_head.weight))

    def divergence(logits_nV: Tensor, reference_nD: Tensor) -> Tensor:
        with torch.no_grad():
            expected_nV = wide(reference_head(reference_nD)[:, :vocab]).log_softmax(-1)
        kl_nV = F.kl_div(wide(logits_nV[:, :vocab]).log_softmax(-1), expected_nV, reduction="none", log_target=True)
        return kl_nV.sum(-1, keepdim=True)

    measure = _in_chunks(divergence, head, max_logits)
    return _where_labelled(measure, hidden_BTD, reference_BTD, labels_BT, ignore)[0]


def token_logps_and_entropies(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps`, and the entropy in nats of the distribution that each label is drawn from, both B x T."""

    def measured(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logp_nV = F.log_softmax(wide(logits_nV) / temperature, dim=-1)
        chosen_n1 = logp_nV.gather(1, labels_n[:, None])
        return torch.cat((chosen_n1, -(logp_nV.exp() * logp_nV).sum(1, keepdim=True)), dim=1)

    measure = _in_chunks(measured, head, max_logits)
    logp_BT, entropy_BT = _where_labelled(measure, hidden_BTD, labels_BT, labels_BT, ignore)
    return logp_BT, entropy_BT


def random_scores(hidden_ND: Tensor, head: Head, key: int) -> Tensor:
    """N numbers whose gradients in the logits are random, of mean zero and covariance diag(p) - p p'.

    That is the covariance of d ln p(y) for y drawn from p, so their squared gradients have the Fisher information for
    a mean; but every token has a part in each: s = sqrt(p) z - p (sqrt(p) . z) with random signs z, since with
    S = diag(sqrt p) (I - sqrt(p) sqrt(p)') diag(p) - p p' is S S'. The signs follow from `key`.
    """

    def scores(logits_nV: Tensor, place_n: Tensor) -> Tensor:
        logits_nV = wide(logits_nV)
        with torch.no_grad():
            first = int(place_n[0]) if len(place_n) else 0
            generator = torch.Generator(logits_nV.device).manual_seed((key + first) % 2**63)
            signs_nV = torch.randint(2, logits_nV.shape, generator=generator, device=logits_nV.device) * 2 - 1
            p_nV = logits_nV.softmax(-1)
            root_nV = p_nV.sqrt() * signs_nV
            s_nV = root_nV - p_nV * root_nV.sum(-1, keepdim=True)
        return (logits_nV * s_nV).sum(-1)

    place_N = torch.arange(len(hidden_ND), device=hidden_ND.device)
    return _in_chunks(scores, head, None)(hidden_ND, place_N)


def _where_labelled(
    measure: Callable[[Tensor, Tensor], Tensor],
    hidden_BTD: Tensor,
    beside_BT: Tensor,
    labels_BT: Tensor,
    ignore: int,
) -> tuple[Tensor, ...]:
    """`measure` (N x D and N of what is beside them to N x K) at positions with a label; K tensors B x T, 0 elsewhere.

    Their number differs from batch to batch, and blocks of memory of ever-different sizes fill a heap with holes that
    the next one just misses. So positions are rounded up to a whole sixteenth of all, by measuring the last one again
    (peak of a fine-tuning run of 3M parameters: 1.15 GB, without it 1.25).
    """
    M = labels_BT.numel()
    hidden_MD, beside_M = hidden_BTD.reshape(M, -1), beside_BT.reshape(M, *beside_BT.shape[2:])
    # A batch keeps its labels on the host too: to ask a GPU for a number is to wait for all that it has to do.
    known_BT = getattr(labels_BT, "on_host", labels_BT)
    index_N = (known_BT.reshape(M) != ignore).nonzero().squeeze(1)
    N = len(index_N)
    if N == M:
        return measure(hidden_MD, beside_M).view(*labels_BT.shape, -1).unbind(-1)
    index_N = index_N.to(labels_BT.device, non_blocking=True)
    step = -(-M // _SIZES)
    some_P = torch.cat((index_N, index_N[-1:].expand(-N % step))) if N else index_N
    found_NK = measure(hidden_MD[some_P], beside_M[some_P])[:N]
    found_MK = found_NK.new_zeros(M, found_NK.shape[1]).index_put((index_N,), found_NK)
    return found_MK.view(*labels_BT.shape, -1).unbind(-1)


def _in_chunks(
    measure: Callable[[Tensor, Tensor], Tensor], head: Head, max_logits: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """A measure of hidden states from one of logits.

    Args:
        measure: (logits n x V as the head gives them, n of what else is known of each position) to n or n x K numbers.
        head: ... x D to ... x V.
        max_logits: elements of a chunk's logits.
    """

    def measured(hidden_nD: Tensor, beside_n: Tensor) -> Tensor:
        return measure(head(hidden_nD), beside_n)

    def chunked(hidden_ND: Tensor, beside_N: Tensor) -> Tensor:
        kept = torch.is_grad_enabled()
        size = chunk(len(head.weight), hidden_ND.device, max_logits, kept)
        if len(beside_N) <= size:
            return measured(hidden_ND, beside_N)
        parts = []
        for h_nD, b_n in zip(hidden_ND.split(size), beside_N.split(size), strict=True):
            if kept:  # the head draws no random numbers, so none need to be replayed
                parts.append(checkpoint(measured, h_nD, b_n, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(measured(h_nD, b_n))
        return torch.cat(parts)

    return chunked
