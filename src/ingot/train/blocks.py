"""All blocks of a model, forward and backward, by functions of our own (`cpp/`) on a CPU.

A compiler sees a step as products that somebody else computes and loops between them, each of which reads and writes
all of the activations. Here what follows a product is done while its sums are in registers (SwiGLU and its gradient,
the sum with the stream), attention never writes scores to memory and skips what no token sees, and gradients of weights
leave as the fp32 that the optimizer reads. It needs no compiling of the model: the library is built once in seconds.

It is for the common decoder: RMSNorm, SwiGLU, no biases, no dropout, where all matrices learn or none. What else there
is (LoRA, LayerNorm, norms of heads, taps) is the compiler's (`ahead.py`) or torch's, and matrix tiles, which are four
times as fast as bf16 in vectors, oneDNN's.

Shapes: B rows, T tokens, M = B T, W width, N = H + 2K heads: H of queries, K of keys, K of values; D features of a
head, E = D / 2, V = H D, U = N D, F features of the feed-forward.
"""

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.model.precision import autocast_dtype
from ingot.model.rotary import Rotation
from ingot.model.settings import ModelConfig
from ingot.model.transformer import Transformer
from ingot.train.native import call, function, words


def able(model: nn.Module) -> bool:
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
        *weights, self._last = _parameters(model)
        size = len(_Weights._fields)
        self._blocks = [weights[i : i + size] for i in range(0, len(weights), size)]

    def __call__(self, x_BTW: Tensor, turn: Rotation | None, first_BT: Tensor | None, *_: Any) -> tuple[Tensor, dict]:
        angles = None if turn is None else torch.cat((turn.cos_BT1E, turn.sin_BT1E), -1)
        if first_BT is not None:
            first_BT = first_BT.expand(x_BTW.shape[:2]).contiguous()
        dtype = autocast_dtype(x_BTW.device) or x_BTW.dtype
        where = _Where(self._config, dtype, x_BTW.shape, angles, first_BT)
        for weights in self._blocks:
            x_BTW = _Block.apply(where, x_BTW, *weights)  # type: ignore[assignment]
        return _LastNorm.apply(where, x_BTW, self._last), {}  # type: ignore[return-value]


class _Weights(NamedTuple):
    """Of a block, in fp32 as they are trained; their gradients."""

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


class _Kept(NamedTuple):
    """Of a block, for its backward pass."""

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
    """A gradient of the stream, exact and as products read it."""

    exact_MW: Tensor
    rounded_MW: Tensor


class _Where:
    """What is the same for all blocks.

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
        self._flow: _Flow | None = None

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
        """Memory for the gradient that the next of the backward passes reads."""
        exact_MW = torch.empty(self.M, self.W)
        rounded_MW = exact_MW if self.dtype == exact_MW.dtype else torch.empty(self.M, self.W, dtype=self.dtype)
        self._flow = _Flow(exact_MW, rounded_MW)
        return self._flow

    def rounded(self, gradient_BTW: Tensor) -> _Flow:
        """A gradient as the pass before has left it, which rounded it too; else it is rounded now."""
        flow, self._flow = self._flow, None
        if flow is not None and flow.exact_MW.data_ptr() == gradient_BTW.data_ptr():
            return flow
        gradient_MW = gradient_BTW.reshape(self.M, self.W).contiguous()
        return _Flow(gradient_MW, gradient_MW.to(self.dtype))


class _Block(torch.autograd.Function):
    """The stream after a block, from the stream before it."""

    @staticmethod
    def forward(ctx: Any, where: _Where, x_BTW: Tensor, *weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MW, out_BTW = x_BTW.reshape(where.M, where.W).contiguous(), torch.empty(x_BTW.shape)
        kept = where.kept(x_MW)
        function(where.dtype, "forward_block")(where.words, words(*weights), words(*kept), out_BTW.data_ptr())
        ctx.where, ctx.weights, ctx.kept = where, _Weights(*weights), kept
        return out_BTW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, "what the backward pass needs is gone with the first one"
        flow, before, of = ctx.where.rounded(gradient_BTW), ctx.where.flow(), ctx.weights.gradients()
        parts = (ctx.weights, kept, of, flow, before)
        function(ctx.where.dtype, "backward_block")(ctx.where.words, *(words(*part) for part in parts))
        return None, before.exact_MW.view_as(gradient_BTW), *of


class _LastNorm(torch.autograd.Function):
    """The hidden states of the last block's stream."""

    @staticmethod
    def forward(ctx: Any, where: _Where, x_BTW: Tensor, gain_W: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.where, ctx.x_BTW, ctx.gain_W = where, x_BTW.contiguous(), gain_W
        out_BTW = torch.empty(x_BTW.shape)
        call(where.dtype, "rms_norm_last", out_BTW, ctx.x_BTW, gain_W, *where.rows)
        return out_BTW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BTW, ctx.x_BTW = ctx.x_BTW, None
        assert x_BTW is not None, "what the backward pass needs is gone with the first one"
        flow, of_gain_W, gradient_BTW = ctx.where.flow(), torch.empty_like(ctx.gain_W), gradient_BTW.contiguous()
        given = (*flow, of_gain_W, None, gradient_BTW, x_BTW, ctx.gain_W)
        call(ctx.where.dtype, "rms_norm_last_backward", *given, *ctx.where.rows)
        return None, flow.exact_MW.view_as(gradient_BTW), of_gain_W
