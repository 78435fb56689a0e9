"""The LM head with C++ kernels: the softmax of a row runs while its logits are in the cache.

Distillation has kernels for stored teachers, and for live ones with the forward KL divergence; other divergences with
a live teacher are those of `train/divergences.py`.

Shapes: n positions, D features, V vocabulary, k stored tokens, K = k + 1 outcomes, P the padded vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ingot.kernels import LANES
from ingot.kernels.cpu_train import available, call
from ingot.model.lm_head import LMHead
from ingot.train.divergences import Divergence, LiveTeacher, StoredTeacher, outcome_gradient


class CPUHead(LMHead):
    """The head of an fp32 model whose width is a multiple of `LANES`. Logit gradients are flat, in its own layout."""

    def prepare(self, dtype: torch.dtype) -> Tensor:
        """The fp32 weight itself, V x D: each product converts what it reads, without a copy in bf16."""
        weight_VD = self.weight.detach()
        assert available(dtype), f"no kernels for {dtype}"
        assert weight_VD.dtype == torch.float32, f"found a weight in {weight_VD.dtype}, expected fp32"
        return weight_VD.contiguous()

    def nll_chunk(self, x_nD: Tensor, weight_PD: Tensor, labels_n: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
        _check("labels", labels_n, len(weight_PD))
        nll_n = torch.empty(len(x_nD), dtype=torch.float32)
        logit_grad_nP = _flat(x_nD, weight_PD)
        inputs = (x_nD.contiguous(), weight_PD, labels_n.long().contiguous())
        call(x_nD.dtype, "head_nll", nll_n, logit_grad_nP, *inputs, needs_grad, *self._sizes(x_nD))
        return nll_n, logit_grad_nP

    def hidden_grad(self, logit_grad_nP: Tensor, weight_PD: Tensor, grad_n: Tensor) -> Tensor:
        out_nD = torch.empty(len(grad_n), weight_PD.shape[1], dtype=torch.float32)
        inputs = (logit_grad_nP, weight_PD, grad_n.float().contiguous())
        call(logit_grad_nP.dtype, "head_hidden_grad", out_nD, *inputs, *self._sizes(out_nD))
        return out_nD

    def weight_grad(self, logit_grad_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
        accumulate = total_VD is not None
        out_VD = torch.empty(self.weight.shape, dtype=torch.float32) if total_VD is None else total_VD
        inputs = (out_VD, logit_grad_nP, scaled_nD.contiguous(), accumulate)
        call(logit_grad_nP.dtype, "head_weight_grad", *inputs, *self._sizes(scaled_nD))
        return out_VD

    def distillation_chunk(self, teacher: Any, divergence: Any, alpha: float, vocab: int) -> Callable[..., Any] | None:
        if isinstance(teacher, StoredTeacher):
            return partial(self._stored, teacher, divergence, alpha, vocab)
        if divergence.name != "forward" or not isinstance(teacher, LiveTeacher):
            return None
        head = teacher.head
        readable = isinstance(head, CPUHead) and head.weight.dtype == torch.float32
        return partial(self._live, head, divergence, alpha, vocab) if readable else None  # pyright: ignore[reportArgumentType]

    def _stored(
        self,
        teacher: StoredTeacher,
        d: Divergence,
        alpha: float,
        vocab: int,
        x_nD: Tensor,
        weight_PD: Tensor,
        labels_n: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        """A chunk for `LMHead.fused`; `rest` is that of `train/divergences.py`."""
        ids_nk, _, _ = values_n = rest[:-1]
        _check("labels", labels_n, len(weight_PD))
        _check("stored ids", ids_nk, vocab)
        logits_nP = self._logits(x_nD, weight_PD)
        one_softmax = d.temperature == 1.0 and vocab == len(weight_PD)
        outcomes_nK = torch.empty(len(x_nD), ids_nk.shape[1] + 1, dtype=torch.float32)
        label_logits_n, log_z_n = torch.empty(2, len(x_nD), dtype=torch.float32)
        ids = ids_nk.contiguous(), labels_n.long().contiguous()
        sizes = ids_nk.shape[1], len(x_nD), len(weight_PD), vocab, torch.get_num_threads()
        results, scale = (outcomes_nK, label_logits_n, log_z_n), 1 / d.temperature
        call(x_nD.dtype, "head_outcomes", *results, logits_nP, *ids, not one_softmax, scale, *sizes)
        teacher_nK, log_sum_n1 = teacher.targets(values_n, d, vocab).teacher_nK, outcomes_nK.logsumexp(-1, keepdim=True)
        divergence_n, grad_nK = outcome_gradient(teacher_nK, outcomes_nK - log_sum_n1, d, alpha, one_softmax)
        nll_n = (log_sum_n1[:, 0] if one_softmax else log_z_n) - label_logits_n
        if rest[-1]:
            sums = None if one_softmax else log_z_n
            inputs = (outcomes_nK, grad_nK.contiguous(), sums, *ids, float(alpha), scale)
            call(x_nD.dtype, "head_outcome_gradient", logits_nP, *inputs, *sizes)
        return torch.stack((alpha * nll_n + (1 - alpha) * divergence_n, nll_n, divergence_n), -1), logits_nP

    def _live(
        self,
        teacher: "CPUHead",
        d: Divergence,
        alpha: float,
        vocab: int,
        x_nD: Tensor,
        weight_PD: Tensor,
        labels_n: Tensor,
        hidden_nD: Tensor,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """A chunk for `LMHead.fused`; `hidden_nD` are the teacher's hidden states."""
        _check("labels", labels_n, len(weight_PD))
        teacher_PD = teacher.prepare(x_nD.dtype)
        logits_nP = self._logits(x_nD, weight_PD)
        teacher_nP = teacher._logits(hidden_nD.to(x_nD.dtype), teacher_PD)
        nll_n, divergence_n = torch.empty(2, len(x_nD), dtype=torch.float32)
        inputs = (logits_nP, teacher_nP, labels_n.long().contiguous(), needs_grad, float(alpha), 1 / d.temperature)
        sizes = len(x_nD), len(weight_PD), len(teacher_PD), vocab, torch.get_num_threads()
        call(x_nD.dtype, "head_kl", nll_n, divergence_n, *inputs, *sizes)
        return torch.stack((alpha * nll_n + (1 - alpha) * divergence_n, nll_n, divergence_n), -1), logits_nP

    def _logits(self, x_nD: Tensor, weight_PD: Tensor) -> Tensor:
        """The logits in the layout of the kernels, flat."""
        logits_nP = _flat(x_nD, weight_PD)
        call(x_nD.dtype, "head_logits", logits_nP, x_nD.contiguous(), weight_PD, *self._sizes(x_nD))
        return logits_nP

    def _sizes(self, x_nD: Tensor) -> tuple[int, ...]:
        return *x_nD.shape, len(self.weight), torch.get_num_threads()


def _flat(x_nD: Tensor, weight_VD: Tensor) -> Tensor:
    return torch.empty(len(x_nD) * -(-len(weight_VD) // LANES) * LANES, dtype=x_nD.dtype)


def _check(name: str, ids: Tensor, vocab: int) -> None:
    """The kernels read and write memory at these ids."""
    if ids.numel():
        low, high = map(int, ids.aminmax())
        assert 0 <= low <= high < vocab, f"found {name} {low} to {high}, expected 0 to {vocab}"
