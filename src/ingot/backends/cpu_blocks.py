"""The backend `cpu`: blocks with C++ kernels (`kernels/cpp/train/`), forward and backward.

Epilogues of matrix products (SwiGLU and its gradient, the residual) run while the sums are in registers. Attention does
not write scores to memory and skips masked blocks. Weight gradients are written in fp32, as the optimizer reads them.
The kernels are built once per machine, not per model.

They support RMSNorm, SwiGLU, no biases, no dropout in training, and parameters that are either all trained or all
frozen. Other models (LoRA, LayerNorm, qk_norm) and taps use PyTorch.

Shapes: B rows, T tokens, M = B T, W width, N = H + 2K heads: H query heads, K key heads, K value heads; D features of a
head, V = H D, U = N D, F features of the feed-forward.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.backends.cpu_decode import CPUOps
from ingot.backends.cpu_head import CPUHead
from ingot.backends.estimate import has_kernel
from ingot.kernels import cpu_decode, cpu_train
from ingot.kernels.build import pack_arguments
from ingot.kernels.cpu_train import call, function
from ingot.model.backend import Backend, Taps
from ingot.model.config import ModelConfig, segment_blocks
from ingot.model.lm_head import LMHead
from ingot.model.precision import autocast_dtype
from ingot.model.rope import Rope
from ingot.model.transformer import document_starts


class CPUDecodeBackend(Backend):
    """PyTorch, with C++ kernels for generation.

    Args:
        notify: receives a message when kernels are built, which takes seconds.
    """

    def __init__(self, notify: Callable[[str], None] | None = None):
        self.notify = notify

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> CPUOps | None:
        return CPUOps(dtype, stream) if cpu_decode.available(device, dtype, stream, self.notify) else None


class CPUBackend(CPUDecodeBackend):
    """C++ kernels for blocks, head and generation. Matrix products are in autocast's dtype, else in fp32."""

    name = "cpu"

    def supports(self, model: Any, ids_BT: Tensor, taps: Taps) -> bool:
        if taps or ids_BT.device.type != "cpu" or (model.config.dropout and model.training):
            return False
        return has_kernel(model.config) and cpu_train.available(_product_dtype(), self.notify) and _is_plain(model)

    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Tensor | None:
        """The first position that each token attends to, (B or 1) x T int32; None: the first of the row."""
        window = model.config.window
        starts_BT = None if documents_BT is None else document_starts(documents_BT)
        if window is None or window >= T:
            return None if starts_BT is None else starts_BT.int()
        first_1T = (torch.arange(T) - window + 1).clamp(min=0)[None]
        return (first_1T if starts_BT is None else torch.maximum(first_1T, starts_BT)).int()

    def blocks(
        self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Tensor | None, taps: Taps
    ) -> tuple[Tensor, dict[str, Tensor]]:
        angles = None if rope is None else torch.cat((rope.cos_BT1E, rope.sin_BT1E), -1)
        if mask is not None:
            mask = mask.expand(x_BTW.shape[:2]).contiguous()
        segment = segment_blocks(model.checkpointing, model.config.depth)
        stored = model.checkpointing in ("none", "selective")  # the kernels compute activation functions again anyway
        shared = _SharedArguments(model.config, _product_dtype(), x_BTW.shape, angles, mask, 0 if stored else segment)
        inputs = x_BTW, *_parameters(model)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return _Blocks.apply(shared, needs_grad, *inputs), {}  # type: ignore[return-value]

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        return CPUHead(weight_VD)


def _product_dtype() -> torch.dtype:
    return autocast_dtype(torch.device("cpu")) or torch.float32


def _is_plain(model: Any) -> bool:
    """Whether all parameters are unsharded fp32 tensors on the CPU, without adapters, all trained or all frozen."""
    if not all(type(matrix) is nn.Linear for block in model.layers.values() for matrix in _matrices(block)):
        return False
    parameters = [*_parameters(model), model.embedding.weight]
    if any(type(p) is not nn.Parameter or p.dtype != torch.float32 or p.device.type != "cpu" for p in parameters):
        return False
    return len({p.requires_grad for p in parameters[:-1]}) == 1


class _Weights(NamedTuple):
    """The weights of a block or their gradients, fp32. Same order as `Weights` in cpp/train/block.h."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    def empty_gradients(self) -> "_Weights":
        """Uninitialised gradients. Those of q, k and v are contiguous, and so are those of gate and up."""
        q, k, v = torch.empty(len(self.q) + 2 * len(self.k), self.q.shape[1]).split([len(self.q), *[len(self.k)] * 2])
        gate, up = torch.empty(2 * len(self.gate), self.gate.shape[1]).chunk(2)
        others = {name: torch.empty_like(getattr(self, name)) for name in ("attention_norm", "o", "ffn_norm", "down")}
        return _Weights(q=q, k=k, v=v, gate=gate, up=up, **others)


def _matrices(block: Any) -> list[nn.Module]:
    attention, ffn = block.attention, block.ffn
    return [attention.q, attention.k, attention.v, attention.o, ffn.gate, ffn.up, ffn.down]


def _parameters(model: Any) -> list[nn.Parameter]:
    """All parameters of the blocks, in the order of `_Weights`, then that of the final norm."""
    parameters: list[nn.Parameter] = []
    for block in model.layers.values():
        q, k, v, o, gate, up, down = (matrix.weight for matrix in _matrices(block))
        parameters += [block.attention_norm.weight, q, k, v, o, block.ffn_norm.weight, gate, up, down]
    return [*parameters, model.norm.weight]


def _by_block(parameters: Sequence[Tensor]) -> tuple[list[_Weights], Tensor]:
    """The weights of each block, and the weight of the final norm."""
    *weights, last_W = parameters
    size = len(_Weights._fields)
    return [_Weights(*weights[i : i + size]) for i in range(0, len(weights), size)], last_W


class _Saved(NamedTuple):
    """The activations of a block for its backward pass. Same order as `Saved` in cpp/train/block.h."""

    x_MW: Tensor
    normed_MW: Tensor
    qkv_MU: Tensor
    lse_BHT: Tensor
    """Log-sum-exp of attention's scores."""
    attended_MV: Tensor
    middle_MW: Tensor
    """The residual stream between attention and feed-forward."""
    middle_normed_MW: Tensor
    gate_up_M2F: Tensor


class _StreamGrad(NamedTuple):
    """The gradient of the residual stream in fp32 and in the dtype of matrix products; updated in place by each block.

    Same order as `StreamGradient` in cpp/train/block.h.
    """

    fp32_MW: Tensor
    product_MW: Tensor


class _SharedArguments:
    """The arguments that all blocks share. Packed in the order of `BlockArguments` in cpp/train/block.h.

    Args:
        dtype: of matrix products.
        angles: (1 or B) x T x 1 x 2E, cosines and then sines; None with learned positions.
        first_BT: the first position that each token attends to, int32; None: the first of the row.
        segment: blocks of a segment, which stores its input only (`model/checkpointing.py`); 0: all is stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        shape: torch.Size,
        angles: Tensor | None,
        first_BT: Tensor | None,
        segment: int = 0,
    ):
        self.config, self.dtype, (self.B, self.T, self.W), self.segment = config, dtype, shape, segment
        self.M, self.V, self.threads = self.B * self.T, config.heads * config.head_size, torch.get_num_threads()
        self._references = angles, first_BT  # `packed` has their addresses
        angle_rows = 0 if angles is None else len(angles)
        sizes = (self.B, self.T, self.W, config.heads, config.kv_heads, config.head_size, config.ffn)
        eps = struct.unpack("<q", struct.pack("<d", config.norm_eps))[0]
        self.packed = pack_arguments(angles, angle_rows, first_BT, *sizes, eps, self.threads)
        self.norm_arguments = (config.norm_eps, self.M, self.W, self.threads)

    def empty_saved(self, x_MW: Tensor) -> _Saved:
        config, M = self.config, self.M
        normed, qkv, attended, middle_normed, gate_up = (
            torch.empty(M, size, dtype=self.dtype)
            for size in (self.W, self.V + 2 * config.kv_heads * config.head_size, self.V, self.W, 2 * config.ffn)
        )
        lse = torch.empty(self.B, config.heads, self.T)
        return _Saved(x_MW, normed, qkv, lse, attended, torch.empty_like(x_MW), middle_normed, gate_up)

    def empty_stream_grad(self) -> _StreamGrad:
        fp32_MW = torch.empty(self.M, self.W)
        same = self.dtype == torch.float32
        return _StreamGrad(fp32_MW, fp32_MW if same else torch.empty(self.M, self.W, dtype=self.dtype))


class _Blocks(torch.autograd.Function):
    """All blocks and the final norm: the residual stream before the first block to hidden states.

    One autograd node for all blocks, because the overhead of a node per block matters for small models.

    Args:
        needs_grad: whether a backward pass may follow; if not, all blocks share one set of buffers.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, shared: _SharedArguments, needs_grad: bool, x_BTW: Tensor, *parameters: Tensor
    ) -> Tensor:
        x_MW, saved = x_BTW.reshape(shared.M, shared.W).contiguous(), []
        blocks, last_W = _by_block(parameters)
        size = shared.segment or len(blocks)
        segments = [blocks[first : first + size] for first in range(0, len(blocks), size)]
        store = needs_grad and not shared.segment
        for segment in segments:
            saved.append([x_MW])
            x_MW = _run_segment(shared, segment, x_MW, saved[-1] if store else None)
        out_BTW = torch.empty(x_BTW.shape)
        call(shared.dtype, "final_norm", out_BTW, x_MW, last_W, *shared.norm_arguments)
        ctx.shared, ctx.segments, ctx.last_W, ctx.saved = shared, segments, last_W, (saved, x_MW)
        return out_BTW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shared, all_saved, ctx.saved = ctx.shared, ctx.saved, None
        assert all_saved is not None, "a second backward pass: the first one freed the activations"
        (saved, x_MW), stream, gradients = all_saved, shared.empty_stream_grad(), [torch.empty_like(ctx.last_W)]
        inputs = (*stream, gradients[0], False, None, gradient_BTW.contiguous(), x_MW, ctx.last_W)
        call(shared.dtype, "final_norm_backward", *inputs, *shared.norm_arguments)
        del all_saved, x_MW, inputs
        for segment in reversed(ctx.segments):
            stored = saved.pop()
            if shared.segment:
                _run_segment(shared, segment, stored[0], stored)
            for weights in reversed(segment):
                gradients[:0] = _block_gradients(shared, weights, stored.pop(), stream)
        return None, None, stream.fp32_MW.view_as(gradient_BTW), *gradients


def _run_segment(shared: _SharedArguments, blocks: Sequence[_Weights], x_MW: Tensor, saved: list[Any] | None) -> Tensor:
    """The residual stream after some blocks.

    Args:
        saved: receives the activations of each block; None: all blocks share one set of buffers.
    """
    forward, activations = function(shared.dtype, "forward_block"), None
    for weights in blocks:
        if saved is None and activations is not None:
            activations = activations._replace(x_MW=x_MW)
        else:
            activations = shared.empty_saved(x_MW)
        x_MW = torch.empty_like(x_MW)
        forward(shared.packed, pack_arguments(*weights), pack_arguments(*activations), x_MW.data_ptr())
        if saved is not None:
            saved.append(activations)
    return x_MW


def _block_gradients(shared: _SharedArguments, weights: _Weights, activations: _Saved, stream: _StreamGrad) -> _Weights:
    """The gradients of a block's weights; `stream` becomes that of its input."""
    gradients = weights.empty_gradients()
    arguments = (weights, activations, gradients, stream)
    function(shared.dtype, "backward_block")(shared.packed, *(pack_arguments(*tensors) for tensors in arguments))
    return gradients
