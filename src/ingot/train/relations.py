"""Distances between what a teacher's and a student's layer compute, for distillation from inside the models.

Features are the states themselves: a learned projection maps the student's to the teacher's width (Romero et al. 2015,
arXiv:1412.6550). Relations are T x T tables of how tokens relate to each other, whose size does not depend on the
width, so nothing is projected:

| relation | table | distance | source |
|---|---|---|---|
| attention | attention probabilities | KL of each row | Jiao et al. 2020, arXiv:1909.10351, with their squared error |
| queries, keys, values | softmax(x x^T / sqrt(D)) | KL of each row | Wang et al. 2021, arXiv:2012.15828 |
| gram | cosine similarities of states | squared Frobenius norm / T^2 | Tung and Mori 2019, arXiv:1907.09682 |

All functions return a value of each token, and the caller divides by the number of tokens that it counts.

Shapes: B rows, T positions, W width, N tokens, H heads, K key heads, A relation heads, D features of a head.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from ingot.model.precision import at_least_fp32
from ingot.train.divergences import kl

_EXCLUDED = -1e9
"""Score of a key that a query does not attend to: its probability is 0, and ln p stays finite, so 0 ln 0 is 0."""
_EPS = 1e-20
"""Added to the mean square of states."""


def normalised(x_NW: Tensor) -> Tensor:
    """States divided by their root mean square, at least fp32: the residual stream grows with depth."""
    x_NW = at_least_fp32(x_NW)
    return x_NW * (x_NW.square().mean(-1, keepdim=True) + _EPS).rsqrt()


def squared_distance(student_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """|student - teacher|^2 / W of each token, N, for a projected student; the teacher's states are normalised here."""
    return (at_least_fp32(student_NW) - normalised(teacher_NW)).square().mean(-1)


def gram_distance(student_BTW: Tensor, teacher_BTW: Tensor, pairs_BTT: Tensor) -> Tensor:
    """The mean over j of (cos(x_i, x_j) of the student - that of the teacher)^2, for each token i, B x T.

    Args:
        pairs_BTT: symmetric, True for the pairs (i, j) that count; of a token without any, the value is 0. If all do,
            the mean over i is the squared Frobenius norm of the tables' difference, divided by T^2.
    """
    error_BTT = (_cosines(student_BTW) - _cosines(teacher_BTW)).square() * pairs_BTT
    return error_BTT.sum(-1) / pairs_BTT.sum(-1).clamp(min=1)


def _cosines(x_BTW: Tensor) -> Tensor:
    unit_BTW = F.normalize(at_least_fp32(x_BTW), dim=-1)
    return unit_BTW @ unit_BTW.transpose(1, 2)


def relation(x_BHTD: Tensor, y_BHTD: Tensor, mask_BTT: Tensor) -> Tensor:
    """ln softmax(x y^T / sqrt(D)) of each head, B x H x T x T.

    Args:
        y_BHTD: with fewer heads, each belongs to as many heads of x (grouped-query attention).
        mask_BTT: True where a query attends to a key, at least to itself.
    """
    x_BHTD, y_BHTD = at_least_fp32(x_BHTD), at_least_fp32(y_BHTD)
    y_BHTD = y_BHTD.repeat_interleave(x_BHTD.shape[1] // y_BHTD.shape[1], 1)
    scores_BHTT = x_BHTD @ y_BHTD.transpose(2, 3) / math.sqrt(x_BHTD.shape[-1])
    return scores_BHTT.masked_fill(~mask_BTT[:, None], _EXCLUDED).log_softmax(-1)


def relation_heads(x_BHTD: Tensor, heads: int) -> Tensor:
    """The vectors of all heads side by side, cut into `heads` equal ones: two models then have equally many."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.transpose(1, 2).reshape(B, T, heads, H * D // heads).transpose(1, 2)


def relation_divergence(student_BHTT: Tensor, teacher_BHTT: Tensor) -> Tensor:
    """The mean over heads of KL(teacher's row, student's row) in nats, B x T.

    Args:
        student_BHTT: logarithms (`relation`). If the numbers of heads differ, probabilities are averaged over heads.
    """
    if student_BHTT.shape[1] != teacher_BHTT.shape[1]:
        student_BHTT, teacher_BHTT = (
            x.logsumexp(1, keepdim=True) - math.log(x.shape[1]) for x in (student_BHTT, teacher_BHTT)
        )
    return kl(teacher_BHTT, student_BHTT).mean(1)
