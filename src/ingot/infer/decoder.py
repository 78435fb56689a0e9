"""A model as decoding needs it: the weights copied once into few large products, and a forward of plain functions.

The forward of training (`model/transformer.py`) is written for gradients, masks and taps; here a token of one row costs
some hundred operations whose price is their number, not their size. So queries, keys and values are one product, gate
and up another (`product.py`), queries and keys are turned together, and the modules of the model are read, not called.
That both give the same logits is tested for every family, against the full forward.

The two numbers of a pair that is turned lie side by side here, not half a head apart: turning is one product of complex
numbers then, in place of three operations. The matrices of queries and keys have their rows exchanged alike, and a
score, which sums over all features of a head, stays the same.

Precision: the products are in `dtype`, so are keys and values on a CPU with a compiler (`cache.py`); everything else
between them (residual stream, norms, rotation, scores) is in fp32, which is what the forward under autocast does, or in
fp64 with a model of fp64.

Shapes: B rows, T positions, M = B T, N of them, S slots, C slots of the cache, H query heads, K key heads, D features
of a head, E = D / 2 pairs of them, W width, V vocabulary.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.infer.cuda_graph import WORTH, Graph, slots_read
from ingot.infer.kv_cache import Cache
from ingot.infer.linear import Product, gated, gelu, head_product, product, way
from ingot.kernels import cpu_decode
from ingot.kernels.precision import autocast_dtype
from ingot.kernels.replay import Tape
from ingot.model.attention import causal_mask
from ingot.model.feedforward import GELU, SwiGLU
from ingot.model.norms import LayerNorm, RMSNorm
from ingot.model.rope import rotation
from ingot.model.transformer import Block, Transformer

_PREFILL_TOKENS = 4096
"""Tokens of prompts that are read at once: enough for full speed, few enough for little memory."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    attention_norm: Function
    qkv: Product
    q_norm: Callable[[Tensor, slice], None] | None
    k_norm: Callable[[Tensor, slice], None] | None
    """Of some heads of queries, keys and values, in place."""
    o: Product
    ffn_norm: Function
    inner: Function
    """What the last product reads."""
    down: Product


class Decoder:
    """The weights of a model, laid out as they are now: make a new one when they have changed.

    Args:
        dtype: of the matrix products; None: autocast's where it is on, else the parameters'.

    What one row needs on a CPU is done by functions of our own where there is a compiler to build them (`native.py`).
    """

    @torch.inference_mode()
    def __init__(self, model: Transformer, dtype: torch.dtype | None = None):
        self.config, self.device = model.config, model.embedding.weight.device
        stored = model.embedding.weight.dtype
        self.dtype = dtype or autocast_dtype(self.device) or stored
        features_D = torch.arange(self.config.head_size, device=self.device)
        self.pairs_D = features_D.view(2, -1).T.flatten() if self.config.positions == "rope" else features_D
        self.order_O = self._order()
        self.stream = torch.promote_types(stored, torch.float32)
        self.native = cpu_decode.available(self.device, self.dtype, self.stream)
        self.way = way(self.device, self.dtype, self.native)
        with torch.autocast(self.device.type, enabled=False):
            self.embedding = model.embedding.weight.detach()
            learned = model.position_embedding
            self.position_embedding = None if learned is None else learned.weight.detach()
            self.layers = [self._layer(block) for block in model.layers.values() if isinstance(block, Block)]
            self.norm = self._norm(model.norm, self.dtype)
            self.head = head_product(self.embedding if model.head is None else model.head.weight, self.dtype, self.way)

    def _layer(self, block: Block) -> _Layer:
        attention = block.attention
        together = partial(product, dtype=self.dtype, way=self.way)
        return _Layer(
            attention_norm=self._norm(block.attention_norm, self.dtype),
            qkv=together([attention.q, attention.k, attention.v], order_O=self.order_O),
            q_norm=None if attention.q_norm is None else self._head_norm(attention.q_norm),
            k_norm=None if attention.k_norm is None else self._head_norm(attention.k_norm),
            o=together([attention.o]),
            ffn_norm=self._norm(block.ffn_norm, self.dtype),
            inner=self._inner(block.ffn),
            down=together([block.ffn.down]),
        )

    def _inner(self, ffn: SwiGLU | GELU) -> Function:
        if isinstance(ffn, SwiGLU):
            return gated(ffn.gate, ffn.up, self.dtype, self.way)
        return gelu(ffn.up, ffn.approximate, self.dtype, self.way)

    def _order(self) -> Tensor:
        """Which rows of the matrices of queries, keys and values, side by side, give which feature."""
        turned, kept = self.config.heads + self.config.kv_heads, self.config.kv_heads
        row_ND = torch.arange((turned + kept) * len(self.pairs_D), device=self.device).view(-1, len(self.pairs_D))
        return torch.cat((row_ND[:turned, self.pairs_D], row_ND[turned:])).view(-1)

    def _norm(self, norm: RMSNorm | LayerNorm, into: torch.dtype, order: Tensor | slice = slice(None)) -> Function:
        """A norm of the stream's precision, which may come in that of what reads it."""
        gain = norm.weight.detach().to(self.stream)[order]
        if isinstance(norm, LayerNorm):
            bias = None if norm.bias is None else norm.bias.detach().to(self.stream)[order]
            if self.native:
                return partial(cpu_decode.layer_norm, gain, bias, norm.eps, into)
            return partial(F.layer_norm, normalized_shape=gain.shape, weight=gain, bias=bias, eps=norm.eps)
        if self.native:
            return partial(cpu_decode.rms_norm, gain, norm.eps, into)
        return partial(_rms, gain, torch.tensor(norm.eps, dtype=self.stream, device=self.device))

    def _head_norm(self, norm: RMSNorm | LayerNorm) -> Callable[[Tensor, slice], None]:
        if self.native and isinstance(norm, RMSNorm):
            gain = norm.weight.detach().to(self.stream)[self.pairs_D]
            return partial(cpu_decode.norm_heads, gain, norm.eps)
        normed = self._norm(norm, self.stream, self.pairs_D)

        def in_place(qkv_BTND: Tensor, heads: slice) -> None:
            qkv_BTND[:, :, heads] = normed(qkv_BTND[:, :, heads])

        return in_place

    def table(self, positions: int) -> Tensor | None:
        """What turns the pairs at the first positions: positions x E complex; None with learned positions."""
        config = self.config
        if config.positions != "rope":
            return None
        index_T = torch.arange(positions, device=self.device)[None]
        angle = rotation(index_T, config.head_size, config.rope_theta, self.stream, config.rope_scaling)
        return torch.complex(angle.cos_BT1E[0, :, 0], angle.sin_BT1E[0, :, 0])

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """What the first layer reads, (B T) x W; positions are read where they are learned."""
        x_BTW = self.embedding[ids_BT].to(self.stream)
        if self.position_embedding is not None:
            x_BTW = x_BTW + self.position_embedding[positions_BT]
        return x_BTW.view(ids_BT.numel(), -1)

    def forward(
        self,
        x_MW: Tensor,
        rows: int,
        attend: Callable[[int, Tensor], Tensor],
        wanted_N: Tensor | slice = slice(None),
    ) -> Tensor:
        """Hidden states N x W before the last norm.

        Args:
            x_MW: embedded tokens of B rows; written over.
            attend: layer and its queries, keys and values B x T x (H + 2K) x D, not turned yet, to B x T x (H D).
            wanted_N: of which of the B T tokens; for the others the last layer ends with attention.
        """
        config = self.config
        M, q, qk = len(x_MW), config.heads, config.heads + config.kv_heads
        for index, layer in enumerate(self.layers):
            qkv_BTND = layer.qkv(layer.attention_norm(x_MW).to(self.dtype)).to(self.stream)
            qkv_BTND = qkv_BTND.view(rows, M // rows, -1, config.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm(qkv_BTND, slice(0, q))
                layer.k_norm(qkv_BTND, slice(q, qk))
            mixed_MW = attend(index, qkv_BTND).view(M, -1)
            if layer is self.layers[-1]:
                x_MW, mixed_MW = x_MW[wanted_N], mixed_MW[wanted_N]
            x_MW = layer.o(mixed_MW.to(self.dtype), x_MW)
            inner_MF = layer.inner(layer.ffn_norm(x_MW).to(self.dtype))
            x_MW = layer.down(inner_MF.to(self.dtype), x_MW)
        return x_MW

    def logits(self, hidden_BW: Tensor) -> Tensor:
        """Hidden states before the last norm to logits B x V, in the precision of the products or in fp32."""
        return self.head(self.norm(hidden_BW).to(self.dtype))


class Rows:
    """Prompts that a decoder has read, and their continuations so far: the keys and values of both.

    Args:
        ids_BT: prompts, padded on the right.
        length_B: of each prompt, on the same device.
        room: new tokens that will be run at most.
        samples: continuations of each prompt; they share the reading of it, and stand side by side.
    """

    def __init__(self, decoder: Decoder, ids_BT: Tensor, length_B: Tensor, room: int, samples: int = 1):
        config, (B, T) = decoder.config, ids_BT.shape
        self.decoder = decoder
        self.length_B, self.prompt, self.made = length_B.repeat_interleave(samples), T, 0
        self.slots = T + room
        self.cache = Cache(config, B * samples, self.slots, decoder.stream, decoder.dtype, decoder.device)
        self.turns_CE = decoder.table(min(self.slots, config.context))
        self.bias_BC = self._holes()
        step = max(1, _PREFILL_TOKENS // T)
        chunks = [slice(i, i + step) for i in range(0, B, step)]
        with torch.autocast(decoder.device.type, enabled=False):
            last_BW = torch.cat([self._read(ids_BT[rows], length_B[rows], rows, samples) for rows in chunks])
            self.logits_BV = decoder.logits(last_BW).repeat_interleave(samples, dim=0)
        """Of the next token of every row; the next step may write over them."""
        self._tape: Tape | None = None
        self._graph: Graph | None = None
        self._graph_of: tuple[int, int] | None = None
        """Rows and slots read of the steps that are recorded."""
        self._records = decoder.device.type == "cuda"

    def run(self, ids_B: Tensor) -> None:
        """Append a token to every row, and make the logits of the next ones.

        What a step computes is recorded once and made again after that: on a GPU (`graph.py`), and where nothing but
        our own functions takes part and no window moves (`tape.py`).
        """
        decoder, config, slot = self.decoder, self.decoder.config, self.prompt + self.made
        self.cache.grow(slot + 1)
        with torch.autocast(decoder.device.type, enabled=False):
            moves = config.window is not None and config.window < self.slots
            if self._records:
                self.logits_BV = self._replayed(ids_B, slot)
            elif self._tape is not None and self._tape.whole:
                self._tape.again(*self._inputs(ids_B, slot))
            elif self._tape is None and decoder.native and not moves:
                inputs = self._inputs(ids_B, slot)
                with cpu_decode.recorded(*inputs) as self._tape:
                    self.logits_BV = self._logits(*inputs, self._bias(slot, slot + 1))
            else:
                self.logits_BV = self._logits(*self._inputs(ids_B, slot), self._bias(slot, slot + 1))
        self.made += 1

    def _inputs(self, ids_B: Tensor, slot: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first layer reads of the tokens in this slot, and what turns their queries and keys."""
        last = self.decoder.config.context - 1  # where a row stays that has ended with a full context
        positions_B = (self.length_B + (slot - self.prompt)).clamp_(max=last)
        turn_BE = None if self.turns_CE is None else self.turns_CE[positions_B]
        return self.decoder.embed(ids_B, positions_B), turn_BE

    def _logits(
        self, x_BW: Tensor, turn_BE: Tensor | None, bias_BS: Tensor | None, slot_1: Tensor | None = None
    ) -> Tensor:
        def attend(index: int, qkv_BTND: Tensor) -> Tensor:
            return self.cache.attend(index, qkv_BTND[:, 0], turn_BE, bias_BS, slot_1)

        return self.decoder.logits(self.decoder.forward(x_BW, len(x_BW), attend))

    def _replayed(self, ids_B: Tensor, slot: int) -> Tensor:
        """The logits by a recorded step; the first of its kind is made plainly."""
        read, slot_1 = slots_read(slot, self.slots), torch.full((1,), slot, device=ids_B.device)

        def step(ids_B: Tensor, slot_1: Tensor) -> Tensor:
            return self._logits(*self._inputs(ids_B, slot_1), self._bias(slot_1, read), slot_1)

        if self._graph_of != (len(ids_B), read):
            self._graph_of, self._graph = (len(ids_B), read), None
        elif self._graph is None and read - slot >= WORTH:
            try:
                self._graph = Graph(step, (ids_B, slot_1))
            except RuntimeError as error:  # nothing has been computed yet
                self._records = False
                warnings.warn(f"steps are not replayed, since recording one failed: {error}", stacklevel=2)
        return step(ids_B, slot_1) if self._graph is None else self._graph(ids_B, slot_1)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these: indices, ascending."""
        self.cache.keep(rows)
        if self._tape is not None and self._tape.whole:  # of so many rows
            self._tape = None
        self._graph = self._graph_of = None
        self.length_B = self.length_B[rows]
        self.bias_BC = None if self.bias_BC is None else self.bias_BC[rows]

    def _read(self, ids_BT: Tensor, length_B: Tensor, rows: slice, samples: int) -> Tensor:
        """Run some of the prompts; the hidden states of their last tokens, B x W."""
        decoder, T = self.decoder, ids_BT.shape[1]
        turn_TE = None if self.turns_CE is None else self.turns_CE[:T]
        into, window = slice(rows.start * samples, rows.stop * samples), decoder.config.window
        moves = not decoder.native and window is not None and window < T
        mask_TT = causal_mask(T, window, decoder.device) if moves else None

        def attend(index: int, qkv_BTND: Tensor) -> Tensor:
            return self.cache.read(index, into, qkv_BTND, turn_TE, samples, mask_TT)

        positions_BT = torch.arange(T, device=decoder.device).expand(ids_BT.shape)
        last_B = torch.arange(0, ids_BT.numel(), T, device=decoder.device) + length_B - 1
        return decoder.forward(decoder.embed(ids_BT, positions_BT), len(ids_BT), attend, last_B)

    def _bias(self, slot: int | Tensor, read: int) -> Tensor | None:
        """What is added to the scores of the first slots: -inf at holes, after this slot and before the window."""
        bias_BS, window = None if self.bias_BC is None else self.bias_BC[:, :read], self.decoder.config.window
        if isinstance(slot, int) and (window is None or slot < window):
            return bias_BS
        slots_S = torch.arange(read, device=self.length_B.device)
        hidden_BS = slots_S[None] > slot
        if window is not None:
            hole_B1 = self.prompt - self.length_B[:, None]
            hidden_BS = hidden_BS | (slots_S + torch.where(slots_S < self.prompt, hole_B1, 0) <= slot - window)
        if bias_BS is None:
            bias_BS = torch.zeros(hidden_BS.shape, dtype=self.cache.wide, device=hidden_BS.device)
        return bias_BS.masked_fill(hidden_BS, -torch.inf)

    def _holes(self) -> Tensor | None:
        """-inf at the slots between a prompt's end and the longest prompt's; None where there are none."""
        slots_C = torch.arange(self.slots, device=self.length_B.device)
        hole_BC = (slots_C >= self.length_B[:, None]) & (slots_C < self.prompt)
        if not hole_BC.any():
            return None
        bias_BC = torch.zeros(hole_BC.shape, dtype=self.cache.wide, device=hole_BC.device)
        return bias_BC.masked_fill_(hole_BC, -torch.inf)


def _rms(gain: Tensor, eps: Tensor, x: Tensor) -> Tensor:
    """RMSNorm in fewer operations than `F.rms_norm` is made of on a CPU, since with few rows each costs its call."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul(torch.addcmul(eps, norm, norm, value=1 / size).rsqrt_()).mul_(gain)
