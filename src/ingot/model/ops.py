"""What objectives do with hidden states and a head: log-probabilities and cross-entropy, a chunk at a time.

Logits are the largest tensor of training (64 rows x 1,024 x 50,257 in fp32 are 13 GB), and only one number per position
is kept of them. So positions without a label are dropped first (they then contribute exactly nothing, to the loss or to
a gradient), the rest is cut into chunks of at most `MAX_LOGITS` elements, and where there is more than one chunk its
logits are computed again in the backward pass instead of kept. One chunk costs nothing extra.

Rejected: computing gradients in the forward pass (saves the recomputation, but needs a hand-written backward for each
loss built on the logits), and masking instead of dropping (prompts and padding would pay for the head).

Shapes: B rows, T positions, N labelled positions, D features, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ingot.model.settings import MAX_LOGITS

IGNORE = -100

Head = Callable[[Tensor], Tensor]


def cross_entropy(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """Sum over labelled positions of -ln p(label), in nats, and their number: never a mean, the engine divides.

    Args:
        hidden_BTD: hidden states, already aligned with the labels (the shift happens in `data`).
        head: ... x D to ... x V.
        labels_BT: ids, `ignore` where there is nothing to predict.

    Returns:
        The sum, fp32 (fp64 for an fp64 model; 0 with zero gradients where all is ignored), and the count, int64.
    """
    logp_BT = token_logps(hidden_BTD, head, labels_BT, ignore=ignore, max_logits=max_logits)
    return -logp_BT.sum(), (labels_BT != ignore).sum()


def token_logps(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """ln p(label) at every position, B x T, 0 where the label is `ignore`; the softmax is in fp32 or better."""
    hidden_MD, labels_M = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    index_N = (labels_M != ignore).nonzero().squeeze(1)
    if len(index_N) == len(labels_M):
        return _chunked(hidden_MD, head, labels_M, temperature, max_logits).view(labels_BT.shape)
    logp_N = _chunked(hidden_MD[index_N], head, labels_M[index_N], temperature, max_logits)
    return logp_N.new_zeros(len(labels_M)).index_put((index_N,), logp_N).view(labels_BT.shape)


def _chunked(hidden_ND: Tensor, head: Head, labels_N: Tensor, temperature: float, max_logits: int) -> Tensor:
    def logps(hidden_nD: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = head(hidden_nD)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        if temperature != 1.0:
            logits_nV = logits_nV / temperature
        return -F.cross_entropy(logits_nV, labels_n, reduction="none")

    with torch.no_grad():
        vocab = head(hidden_ND[:0]).shape[-1]
    size = max(1, max_logits // vocab)
    if len(labels_N) <= size:
        return logps(hidden_ND, labels_N)
    parts = []
    for h_nD, l_n in zip(hidden_ND.split(size), labels_N.split(size), strict=True):
        if torch.is_grad_enabled():
            # The head draws no random numbers, so none need to be replayed.
            parts.append(checkpoint(logps, h_nD, l_n, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(logps(h_nD, l_n))
    return torch.cat(parts)
