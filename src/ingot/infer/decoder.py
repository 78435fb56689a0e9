"""A model as decoding needs it: the weights copied once into few large products, and a forward of plain functions.

The forward of training (`model/transformer.py`) is written for gradients, masks and taps; here a token of one row costs
some hundred operations whose price is their number, not their size. So queries, keys and values are one product, gate
and up another (`product.py`), the rotation is three operations over queries and keys together, keys and values are
written with one copy, and the modules of the model are read, not called. That both give the same logits is tested for
every family, against the full forward.

Precision: the products are in `dtype`, everything between them (residual stream, norms, rotation, attention and its
cache, softmax) in fp32, which is what the forward under autocast does, or in fp64 with a model of fp64.

The cache has slots: all rows write slot n at the same time, so a row whose prompt is shorter than the longest has a
hole between prompt and continuation, which its mask hides. Keys are in fp32, values in `dtype`. On a CPU values are
weighted and summed by `torch.embedding_bag`, whose kernel reads them at the memory's speed. One layer, 32 rows, 12
heads of 64, 128 keys, 2 cores, in us, fp32 / bf16: scores as queries times keys 600 / 920, as keys times queries 60 %
of that in fp32 (467 to 831 where reading the keys takes 413); values as a product 760 / 390, as bags 340 / 135; both by
`F.scaled_dot_product_attention` 1,600 / 3,200; both as one product over all heads, with zeros between them, 2,120 /
2,250. Rejected besides: rows that write at their own positions (indexed writes, and a mask of each row's own all the
same).

Shapes: B rows, T positions, S slots, C slots of the cache, L layers, H query heads, K key heads, G = H / K, D features
of a head, W width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.infer.product import fill, head_product, product, tiled, weighed
from ingot.model.attention import causal_mask
from ingot.model.feedforward import SwiGLU
from ingot.model.norms import LayerNorm, RMSNorm
from ingot.model.precision import autocast_dtype
from ingot.model.rotary import rotation
from ingot.model.transformer import Block, Transformer

_PREFILL_TOKENS = 4096
"""Tokens of prompts that are read at once: enough for full speed, few enough for little memory."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    attention_norm: Function
    qkv: Function
    q_norm: Function | None
    k_norm: Function | None
    o: Function
    ffn_norm: Function
    up: Function
    activation: Function
    down: Function


class Decoder:
    """The weights of a model, laid out as they are now: make a new one when they have changed.

    Args:
        dtype: of the matrix products; None: autocast's where it is on, else the parameters'.
        single: one row is to be continued at a time, as in a chat; several can be all the same, but slower.
    """

    @torch.inference_mode()
    def __init__(self, model: Transformer, dtype: torch.dtype | None = None, *, single: bool = False):
        self.config, self.device = model.config, model.embedding.weight.device
        stored = model.embedding.weight.dtype
        self.dtype = dtype or autocast_dtype(self.device) or stored
        self.single = single and tiled(self.device, self.dtype)  # elsewhere one layout serves both
        self.stream = torch.promote_types(stored, torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            self.embedding = model.embedding.weight.detach()
            learned = model.position_embedding
            self.position_embedding = None if learned is None else learned.weight.detach()
            self.layers = [self._layer(block) for block in model.layers.values() if isinstance(block, Block)]
            self.norm = self._norm(model.norm)
            self.head = head_product(
                self.embedding if model.head is None else model.head.weight, self.dtype, self.single
            )
        self.full = fill(self.device, self.dtype)

    def _layer(self, block: Block) -> _Layer:
        attention, ffn = block.attention, block.ffn
        gated = isinstance(ffn, SwiGLU)
        together = partial(product, dtype=self.dtype, single=self.single)
        return _Layer(
            attention_norm=self._norm(block.attention_norm),
            qkv=together([attention.q, attention.k, attention.v]),
            q_norm=None if attention.q_norm is None else self._norm(attention.q_norm),
            k_norm=None if attention.k_norm is None else self._norm(attention.k_norm),
            o=together([attention.o]),
            ffn_norm=self._norm(block.ffn_norm),
            up=together([ffn.gate, ffn.up] if gated else [ffn.up]),
            activation=_swiglu if gated else partial(F.gelu, approximate=ffn.approximate),
            down=together([ffn.down]),
        )

    def _norm(self, norm: RMSNorm | LayerNorm) -> Function:
        gain = norm.weight.detach().to(self.stream)
        if isinstance(norm, LayerNorm):
            bias = None if norm.bias is None else norm.bias.detach().to(self.stream)
            return partial(F.layer_norm, normalized_shape=gain.shape, weight=gain, bias=bias, eps=norm.eps)
        return partial(_rms, gain, torch.tensor(norm.eps, dtype=self.stream, device=self.device))

    def tables(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and signed sines of the first positions, each positions x 1 x D; None with learned positions."""
        config = self.config
        if config.positions != "rope":
            return None
        index_T = torch.arange(positions, device=self.device)[None]
        turn = rotation(index_T, config.head_size, config.rope_theta, self.stream, config.rope_scaling)
        cos, sin = turn.cos_BT1E[0], turn.sin_BT1E[0]
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        attend: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Hidden states B x T x W before the last norm.

        Args:
            positions_BT: of these tokens; read where positions are learned.
            turn: cosines and signed sines of these positions, (B or 1) x T x 1 x D.
            attend: layer and its queries, keys and values B x T x (H + 2K) x D to B x T x (H D).
        """
        config = self.config
        (B, T), q, qk = ids_BT.shape, config.heads, config.heads + config.kv_heads
        x_MW = self.embedding[ids_BT].to(self.stream)
        if self.position_embedding is not None:
            x_MW = x_MW + self.position_embedding[positions_BT]
        x_MW = x_MW.view(B * T, -1)
        for index, layer in enumerate(self.layers):
            qkv_BTND = layer.qkv(layer.attention_norm(x_MW).to(self.dtype)).to(self.stream)
            qkv_BTND = qkv_BTND.view(B, T, -1, config.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv_BTND[:, :, :q] = layer.q_norm(qkv_BTND[:, :, :q])
                qkv_BTND[:, :, q:qk] = layer.k_norm(qkv_BTND[:, :, q:qk])
            if turn is not None:
                turned = qkv_BTND[:, :, :qk]
                swapped = turned.roll(config.head_size // 2, -1)
                torch.addcmul(turned * turn[0], swapped, turn[1], out=turned)
            mixed_MW = attend(index, qkv_BTND).view(B * T, -1)
            x_MW = x_MW.add_(layer.o(mixed_MW.to(self.dtype)))
            inner_MF = layer.activation(layer.up(layer.ffn_norm(x_MW).to(self.dtype)))
            x_MW = x_MW.add_(layer.down(inner_MF.to(self.dtype)))
        return x_MW.view(B, T, -1)

    def logits(self, hidden_BW: Tensor) -> Tensor:
        """Hidden states before the last norm to logits B x V, in the precision of the products."""
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
        self.decoder, self.scale = decoder, config.head_size**-0.5
        self.length_B, self.prompt, self.made = length_B.repeat_interleave(samples), T, 0
        shape = (config.depth, B * samples, config.kv_heads, T + room, config.head_size)
        self.keys_LBKCD = torch.empty(shape, dtype=decoder.stream, device=decoder.device)
        self.values_LBKCD = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.turns = decoder.tables(min(T + room, config.context))
        self.bias_BC = self._holes()
        step = max(1, _PREFILL_TOKENS // T)
        chunks = [slice(i, i + step) for i in range(0, B, step)]
        with torch.autocast(decoder.device.type, enabled=False):
            last_BW = torch.cat([self._read(ids_BT[rows], length_B[rows], rows, samples) for rows in chunks])
            self.logits_BV = decoder.logits(last_BW).repeat_interleave(samples, dim=0)
        """Of the next token of every row."""

    def run(self, ids_B: Tensor) -> None:
        """Append a token to every row, and make the logits of the next ones."""
        decoder, B = self.decoder, len(ids_B)
        full = max(B, decoder.full)
        ids_MT, positions_MT = ids_B.new_zeros(full, 1), ids_B.new_zeros(full, 1)
        ids_MT[:B, 0] = ids_B
        last = decoder.config.context - 1  # where a row stays that has ended with a full context
        positions_MT[:B, 0] = (self.length_B + self.made).clamp_(max=last)
        turn = None if self.turns is None else (self.turns[0][positions_MT], self.turns[1][positions_MT])
        slot = self.prompt + self.made
        attend = partial(self._attend, slot, self._bias(slot), self._bags(slot))
        with torch.autocast(decoder.device.type, enabled=False):
            hidden_MTW = decoder.forward(ids_MT, positions_MT, turn, attend)
            self.logits_BV = decoder.logits(hidden_MTW[:, 0])[:B]
        self.made += 1

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these: indices, ascending."""
        used = self.prompt + self.made
        for kept_BKCD in (*self.keys_LBKCD, *self.values_LBKCD):
            kept_BKCD[: len(rows), :, :used] = kept_BKCD[rows, :, :used]
        self.keys_LBKCD = self.keys_LBKCD[:, : len(rows)]
        self.values_LBKCD = self.values_LBKCD[:, : len(rows)]
        self.length_B = self.length_B[rows]
        self.bias_BC = None if self.bias_BC is None else self.bias_BC[rows]

    def _read(self, ids_BT: Tensor, length_B: Tensor, rows: slice, samples: int) -> Tensor:
        """Run some of the prompts; the hidden states of their last tokens, B x W."""
        decoder, T = self.decoder, ids_BT.shape[1]
        config = decoder.config
        heads, window = (config.heads, config.kv_heads, config.kv_heads), config.window
        mask_TT = None if window is None or window >= T else causal_mask(T, window, decoder.device)
        into = slice(rows.start * samples, rows.stop * samples)

        def attend(index: int, qkv_BTND: Tensor) -> Tensor:
            q_BHTD, k_BKTD, v_BKTD = qkv_BTND.transpose(1, 2).split(heads, dim=1)
            self.keys_LBKCD[index, into, :, :T] = k_BKTD.repeat_interleave(samples, dim=0)
            self.values_LBKCD[index, into, :, :T] = v_BKTD.repeat_interleave(samples, dim=0)
            grouped, causal = heads[0] != heads[1], mask_TT is None
            out_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, mask_TT, is_causal=causal, enable_gqa=grouped
            )
            return out_BHTD.transpose(1, 2).flatten(2)

        positions_BT = torch.arange(T, device=decoder.device).expand(ids_BT.shape)
        turn = None if self.turns is None else (self.turns[0][:T], self.turns[1][:T])
        hidden_BTW = decoder.forward(ids_BT, positions_BT, turn, attend)
        return hidden_BTW[torch.arange(len(ids_BT), device=decoder.device), length_B - 1]

    def _attend(
        self, slot: int, bias_BS: Tensor | None, bags: tuple[Tensor, Tensor] | None, index: int, qkv_BTND: Tensor
    ) -> Tensor:
        """One new token a row against all slots up to its own; rows M >= B, of which the first B are real."""
        heads = self.decoder.config.heads
        keys_BKCD, values_BKCD = self.keys_LBKCD[index], self.values_LBKCD[index]
        (B, K, C, D), missing = keys_BKCD.shape, len(qkv_BTND) - len(keys_BKCD)
        qkv_BND = qkv_BTND[:B, 0]
        keys_BKCD[:, :, slot] = qkv_BND[:, heads : heads + K]
        values_BKCD[:, :, slot] = qkv_BND[:, heads + K :]
        q_RGD = (qkv_BND[:, :heads] * self.scale).view(B * K, -1, D)
        score_RSG = torch.bmm(keys_BKCD.view(B * K, C, D)[:, : slot + 1], q_RGD.transpose(1, 2))
        score_RGS = score_RSG.transpose(1, 2).contiguous()  # which costs nothing where a head has keys of its own
        if bias_BS is not None:
            score_RGS.view(B, -1, slot + 1).add_(bias_BS[:, None])
        p_RGS = score_RGS.softmax(-1).to(values_BKCD.dtype)
        if bags is None:
            out_BV = torch.bmm(p_RGS, values_BKCD.view(B * K, C, D)[:, : slot + 1]).view(B, -1)
        else:
            out_BV = weighed(values_BKCD.view(-1, D), *bags, p_RGS.view(-1)).view(B, -1)
        return F.pad(out_BV, (0, 0, 0, missing)) if missing else out_BV

    def _bags(self, slot: int) -> tuple[Tensor, Tensor] | None:
        """Of every query head the places of its values in a layer's cache, and where each head's begin; on a CPU."""
        if self.decoder.device.type != "cpu":
            return None
        _, B, K, C, _ = self.values_LBKCD.shape
        H, S = self.decoder.config.heads, slot + 1
        slots_S = torch.arange(S, dtype=torch.int32)
        first_BH = torch.arange(0, B * K * C, C, dtype=torch.int32).repeat_interleave(H // K)
        return (first_BH[:, None] + slots_S).view(-1), torch.arange(0, B * H * S, S, dtype=torch.int32)

    def _bias(self, slot: int) -> Tensor | None:
        """What is added to the scores of the slots up to this one: -inf at holes and before the window."""
        bias_BS, window = None if self.bias_BC is None else self.bias_BC[:, : slot + 1], self.decoder.config.window
        if window is None or slot < window:
            return bias_BS
        slots_S = torch.arange(slot + 1, device=self.length_B.device)
        hole_B1 = self.prompt - self.length_B[:, None]
        before_BS = slots_S + torch.where(slots_S < self.prompt, hole_B1, 0) <= slot - window
        if bias_BS is None:
            bias_BS = torch.zeros(before_BS.shape, dtype=self.keys_LBKCD.dtype, device=before_BS.device)
        return bias_BS.masked_fill(before_BS, -torch.inf)

    def _holes(self) -> Tensor | None:
        """-inf at the slots between a prompt's end and the longest prompt's; None where there are none."""
        slots_C = torch.arange(self.keys_LBKCD.shape[3], device=self.length_B.device)
        hole_BC = (slots_C >= self.length_B[:, None]) & (slots_C < self.prompt)
        if not hole_BC.any():
            return None
        bias_BC = torch.zeros(hole_BC.shape, dtype=self.keys_LBKCD.dtype, device=hole_BC.device)
        return bias_BC.masked_fill_(hole_BC, -torch.inf)


def _rms(gain: Tensor, eps: Tensor, x: Tensor) -> Tensor:
    """RMSNorm in fewer operations than `F.rms_norm` is made of on a CPU, since with few rows each costs its call."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul(torch.addcmul(eps, norm, norm, value=1 / size).rsqrt_()).mul_(gain)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
