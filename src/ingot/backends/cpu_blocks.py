"""All blocks of a model, forward and backward, by functions of our own (`cpp/`) on a CPU.

A compiler sees a step as products that somebody else computes and loops between them, each of which reads and writes
all of the activations. Here what follows a product is done while its sums are in registers (SwiGLU and its gradient,
the sum with the stream), attention never writes scores to memory and skips what no token sees, and gradients of weights
leave as the fp32 that the optimizer reads. It needs no compiling of the model: the library is built once in seconds.

It is for the common decoder: RMSNorm, SwiGLU, no biases, no dropout, where all matrices learn or none. What else there
is (LoRA, LayerNorm, norms of heads, taps) is the compiler's (`ahead.py`) or torch's.

Shapes: B rows, T tokens, M = B T, W width, N = H + 2K heads: H of queries, K of keys, K of values; D features of a
head, E = D / 2, V = H D, U = N D, F features of the feed-forward.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.kernels.cpu_train import call, function, words
from ingot.kernels.precision import autocast_dtype
from ingot.model.config import ModelConfig
from ingot.model.rope import Rotation
from ingot.model.transformer import Transformer


def supports(model: nn.Module) -> bool:
    """Whether these are the model's blocks, of which all learn or none."""
    if not (isinstance(model, Transformer) and model.config.common_block):
        return False
    if not all(type(matrix) is nn.Linear for block in model.layers.values() for matrix in _matrices(block)):
        return False
    parameters = _parameters(model)
    kinds = {(p.dtype, p.device.type) for p in (*parameters, model.embedding.weight)}
    return kinds == {(torch.float32, "cpu")} and len({p.requires_grad for p in parameters}) == 1


class Stack:
    """`Transformer.stack` of such a model; products are in what autocast says, else in fp32."""

    def __init__(self, model: Any):
        self._config: ModelConfig = model.config
        self._parameters = _parameters(model)

    def __call__(self, x_BTW: Tensor, turn: Rotation | None, first_BT: Tensor | None, *_: Any) -> tuple[Tensor, dict]:
        angles = None if turn is None else torch.cat((turn.cos_BT1E, turn.sin_BT1E), -1)
        if first_BT is not None:
            first_BT = first_BT.expand(x_BTW.shape[:2]).contiguous()
        dtype = autocast_dtype(x_BTW.device) or x_BTW.dtype
        where = _Where(self._config, dtype, x_BTW.shape, angles, first_BT)
        given = x_BTW, *self._parameters
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        return _Stack.apply(where, keep, *given), {}  # type: ignore[return-value]


class _Weights(NamedTuple):
    """Of a block, in fp32 as they are trained; their gradients. In the order of `Weights` in cpp/block.h."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    def gradients(self) -> "_Weights":
        """Memory for them: of matrices that read the same one after another."""
        q, k, v = torch.empty(len(self.q) + 2 * len(self.k), self.q.shape[1]).split([len(self.q), *[len(self.k)] * 2])
        gate, up = torch.empty(2 * len(self.gate), self.gate.shape[1]).chunk(2)
        others = {name: torch.empty_like(getattr(self, name)) for name in ("attention_norm", "o", "ffn_norm", "down")}
        return _Weights(q=q, k=k, v=v, gate=gate, up=up, **others)


def _matrices(block: Any) -> list[nn.Module]:
    attention, ffn = block.attention, block.ffn
    return [attention.q, attention.k, attention.v, attention.o, ffn.gate, ffn.up, ffn.down]


def _parameters(model: Any) -> list[nn.Parameter]:
    """In the order of `_Weights`, block after block, and the last norm's."""
    found: list[nn.Parameter] = []
    for block in model.layers.values():
        q, k, v, o, gate, up, down = (matrix.weight for matrix in _matrices(block))
        found += [block.attention_norm.weight, q, k, v, o, block.ffn_norm.weight, gate, up, down]
    return [*found, model.norm.weight]


def _in_blocks(parameters: Sequence[Tensor]) -> tuple[list[_Weights], Tensor]:
    """Each block's, and the last norm's."""
    *weights, last_W = parameters
    size = len(_Weights._fields)
    return [_Weights(*weights[i : i + size]) for i in range(0, len(weights), size)], last_W


class _Kept(NamedTuple):
    """Of a block, for its backward pass. In the order of `Kept` in cpp/block.h."""

    x_MW: Tensor
    normed_MW: Tensor
    qkv_MU: Tensor
    logs_BHT: Tensor
    """Logarithms of the sums that attention divides by."""
    mixed_MV: Tensor
    middle_MW: Tensor
    """The stream between attention and feed-forward."""
    middle_normed_MW: Tensor
    gates_M2F: Tensor


class _Flow(NamedTuple):
    """The gradient of the stream, exact and as products read it; a block's backward pass leaves its own in place.

    In the order of `Flow` in cpp/block.h.
    """

    exact_MW: Tensor
    rounded_MW: Tensor


class _Where:
    """What is the same for all blocks. Its words are in the order of `Where` in cpp/block.h.

    Args:
        dtype: of products.
        angles: (1 or B) x T x 1 x 2E, cosines and then sines; None where positions are learned.
        first_BT: the first slot that a token sees, int32; None: its row's first.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        shape: torch.Size,
        angles: Tensor | None,
        first_BT: Tensor | None,
    ):
        self.config, self.dtype, (self.B, self.T, self.W) = config, dtype, shape
        self.M, self.V, self.threads = self.B * self.T, config.heads * config.head_size, torch.get_num_threads()
        self._held = angles, first_BT
        turns = 0 if angles is None else len(angles)
        sizes = (self.B, self.T, self.W, config.heads, config.kv_heads, config.head_size, config.ffn)
        eps = struct.unpack("<q", struct.pack("<d", config.norm_eps))[0]
        self.words = words(angles, turns, first_BT, *sizes, eps, self.threads)
        self.rows = (config.norm_eps, self.M, self.W, self.threads)
        """What functions of single rows are told last."""

    def kept(self, x_MW: Tensor) -> _Kept:
        """Memory for it."""
        config, M = self.config, self.M
        normed, qkv, mixed, middle_normed, gates = (
            torch.empty(M, size, dtype=self.dtype)
            for size in (self.W, self.V + 2 * config.kv_heads * config.head_size, self.V, self.W, 2 * config.ffn)
        )
        logs = torch.empty(self.B, config.heads, self.T)
        return _Kept(x_MW, normed, qkv, logs, mixed, torch.empty_like(x_MW), middle_normed, gates)

    def flow(self) -> _Flow:
        """Memory for it."""
        exact_MW = torch.empty(self.M, self.W)
        same = self.dtype == exact_MW.dtype
        return _Flow(exact_MW, exact_MW if same else torch.empty(self.M, self.W, dtype=self.dtype))


class _Stack(torch.autograd.Function):
    """The hidden states behind the last norm, from the stream before the first block.

    It is one node of the graph: what a node costs beside its own computing counts where a model is small.

    Args:
        keep: whether a backward pass may follow; where none does all blocks use the same memory.
    """

    @staticmethod
    def forward(ctx: Any, where: _Where, keep: bool, x_BTW: Tensor, *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MW, all_kept = x_BTW.reshape(where.M, where.W).contiguous(), []
        blocks, last_W = _in_blocks(parameters)
        forward = function(where.dtype, "forward_block")
        for weights in blocks:
            kept = where.kept(x_MW) if keep or not all_kept else all_kept.pop()._replace(x_MW=x_MW)
            x_MW = torch.empty_like(x_MW)
            forward(where.words, words(*weights), words(*kept), x_MW.data_ptr())
            all_kept.append(kept)
        out_BTW = torch.empty(x_BTW.shape)
        call(where.dtype, "rms_norm_last", out_BTW, x_MW, last_W, *where.rows)
        ctx.where, ctx.blocks, ctx.last_W, ctx.kept = where, blocks, last_W, (all_kept, x_MW)
        return out_BTW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        where, kept, ctx.kept = ctx.where, ctx.kept, None
        assert kept is not None, "what the backward pass needs is gone with the first one"
        (all_kept, x_MW), flow, found = kept, where.flow(), [torch.empty_like(ctx.last_W)]
        given = (*flow, found[0], False, None, gradient_BTW.contiguous(), x_MW, ctx.last_W)
        call(where.dtype, "rms_norm_last_backward", *given, *where.rows)
        backward = function(where.dtype, "backward_block")
        for weights in reversed(ctx.blocks):
            kept, of = all_kept.pop(), weights.gradients()
            backward(where.words, *(words(*part) for part in (weights, kept, of, flow)))
            found[:0] = of
        return None, None, flow.exact_MW.view_as(gradient_BTW), *found
