"""The negative log-likelihood of labels and its gradient on a GPU, as a Triton kernel.

Shapes: n positions, P the padded vocabulary.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Logits of a row that a program reads at a time."""
_LOWEST = -3.0e38
"""Initial maximum: less than any logit, but finite, because inf - inf is NaN."""


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, needs_grad: bool) -> Tensor:
    """-ln p(label), n in fp32.

    With `needs_grad` the logits are overwritten with the gradient p - onehot(label), and 0 in the padding.

    Each program processes a row. It reads the row once for the log-sum-exp (online softmax, Milakov and Gimelshein
    2018, arXiv:1805.02867) and once more to write the gradient.
    """
    assert logits_nP.stride(1) == 1, "rows must be contiguous"
    n, padded = logits_nP.shape
    nll_n = torch.empty(n, dtype=torch.float32, device=logits_nP.device)
    if n:
        block = min(_BLOCK, triton.next_power_of_2(padded))
        sizes = (vocab, padded, logits_nP.stride(0))
        _nll_rows[(n,)](logits_nP, labels_n.contiguous(), nll_n, *sizes, _LOWEST, needs_grad, block, num_warps=8)
    return nll_n


@triton.jit
def _nll_rows(
    logits, labels, nll, vocab, padded, stride, lowest, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    label_logit = tl.load(logits + label).to(tl.float32)  # before any thread overwrites it
    lane = tl.arange(0, BLOCK)
    largest = lowest
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    log_z = largest + tl.log(tl.sum(total, 0))
    tl.store(nll + row, log_z - label_logit)
    if NEEDS_GRAD:
        for start in range(0, padded, BLOCK):
            index = start + lane
            x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_z) - tl.where(index == label, 1.0, 0.0)
            tl.store(logits + index, grad.to(logits.dtype.element_ty), mask=index < padded)
