"""The negative log-likelihood of labels on a GPU, as a Triton kernel.

Shapes: n positions, P the vocabulary padded.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Logits of a row that are read at a time."""
_LOWEST = -3.0e38
"""Less than any logit, and finite: the difference of two is a number."""


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, keep: bool) -> Tensor:
    """-ln p(label), n in fp32. Where `keep`, logits become p - 1(label) in place, and 0 in the padding.

    A program processes a row: it reads it once for the sum of exponentials (Milakov and Gimelshein 2018,
    arXiv:1805.02867) and once more to write.
    """
    assert logits_nP.stride(1) == 1, "rows must be contiguous"
    n, padded = logits_nP.shape
    nll_n = torch.empty(n, dtype=torch.float32, device=logits_nP.device)
    if n:
        block = min(_BLOCK, triton.next_power_of_2(padded))
        arguments = (logits_nP, labels_n.contiguous(), nll_n, vocab, padded, logits_nP.stride(0), _LOWEST, keep, block)
        _nll_rows[(n,)](*arguments, num_warps=8)
    return nll_n


@triton.jit
def _nll_rows(
    logits, labels, nll, vocab, padded, stride, lowest, KEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    of_label = tl.load(logits + label).to(tl.float32)  # before any thread overwrites it
    lane = tl.arange(0, BLOCK)
    largest = lowest
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    log_z = largest + tl.log(tl.sum(total, 0))
    tl.store(nll + row, log_z - of_label)
    if KEEP:
        for start in range(0, padded, BLOCK):
            at = start + lane
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            excess = tl.exp(x - log_z) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits + at, excess.to(logits.dtype.element_ty), mask=at < padded)
