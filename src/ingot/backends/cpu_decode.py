"""The operations of generation with C++ kernels on a CPU. Shapes as in `infer/ops.py`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ingot.infer.ops import Function, Linear, TorchOps, effective_weight
from ingot.kernels import cpu_decode
from ingot.model.norms import LayerNorm, RMSNorm


class CPUOps(TorchOps):
    """Linear layers with packed weights; attention, norms and argmax in one call each."""

    def __init__(self, dtype: torch.dtype, stream: torch.dtype):
        super().__init__(dtype, stream)
        self.key_dtype = dtype

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        return partial(cpu_decode.linear, cpu_decode.pack(weight_OI.to(self.dtype)), len(weight_OI), bias_O)

    def swiglu(self, gate: nn.Linear, up: nn.Linear) -> Function:
        assert (gate.bias is None) == (up.bias is None), "layers with and without a bias cannot be fused"
        panels = cpu_decode.pack_gated(*(effective_weight(layer).to(self.dtype) for layer in (gate, up)))
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).float()
        return partial(cpu_decode.swiglu, panels, gate.out_features, bias)

    def gelu(self, up: nn.Linear, approximate: str) -> Function:
        bias = None if up.bias is None else up.bias.float()
        panels = cpu_decode.pack(effective_weight(up).to(self.dtype))
        return partial(cpu_decode.gelu, panels, up.out_features, bias, approximate == "tanh")

    def norm(self, norm: RMSNorm | LayerNorm) -> Function:
        gain = norm.weight.detach().float()
        if isinstance(norm, LayerNorm):
            bias = None if norm.bias is None else norm.bias.detach().float()
            return partial(cpu_decode.layer_norm, gain, bias, norm.eps, self.dtype)
        return partial(cpu_decode.rms_norm, gain, norm.eps, self.dtype)

    def head_norm(self, norm: RMSNorm | LayerNorm, order_D: Tensor) -> Callable[[Tensor, slice], None]:
        if not isinstance(norm, RMSNorm):
            return super().head_norm(norm, order_D)
        return partial(cpu_decode.norm_heads, norm.weight.detach().float()[order_D], norm.eps)

    def attend_prompts(
        self,
        qkv_BTND: Tensor,
        rope_TE: Tensor | None,
        keys_RKCD: Tensor,
        values_RKCD: Tensor,
        window: int | None,
        samples: int,
    ) -> Tensor:
        return cpu_decode.attend_prompts(qkv_BTND, rope_TE, keys_RKCD, values_RKCD, window, samples)

    def attend(
        self,
        qkv_BND: Tensor,
        rope_BE: Tensor | None,
        keys_BKCD: Tensor,
        values_BKCD: Tensor,
        bias_BS: Tensor | None,
        used: int,
        slot_1: Tensor | None = None,
    ) -> Tensor:
        return cpu_decode.attend(qkv_BND, rope_BE, keys_BKCD, values_BKCD, bias_BS, used)

    def argmax(self, logits_BV: Tensor, allowed: int) -> tuple[Tensor, Tensor]:
        return cpu_decode.argmax(logits_BV, allowed)
