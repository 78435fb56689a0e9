"""The decoder: prefill and decoding steps over a KV cache.

The forward pass of training (`model/transformer.py`) supports gradients, masks and taps. In generation a step consists
of about a hundred small operations, and their number determines its time. So the decoder reads the model's modules once
instead of calling them, lays the weights out for few large matrix products, and runs a set of operations (`ops.py`).
Both forward passes give the same logits, which is tested for every family.

The two features of a rotary pair are adjacent here, not half a head apart, so that a rotation is one complex product.
The rows of the query and key weights are permuted in the same way, which leaves the scores unchanged.

Matrix products are in `dtype`; the residual stream, norms, rotations and scores are in fp32, as under autocast (in fp64
for an fp64 model).

Shapes: B rows, T positions, M = B T tokens, N of them, S slots in use, C slots of the cache, H query heads, K key
heads, D features of a head, E = D / 2 pairs of features, W width, F inner features, V vocabulary.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.infer.kv_cache import KVCache
from ingot.infer.ops import Function, Linear, TorchOps
from ingot.model.feedforward import SwiGLU
from ingot.model.precision import autocast_dtype
from ingot.model.rope import make_rope
from ingot.model.transformer import Block, Transformer

_PREFILL_TOKENS = 4096
"""Tokens of a prefill chunk: enough for full speed, with little memory."""
_MIN_SLOTS = 256
"""Smallest number of slots that a recorded step reads."""
_RECORD_STEPS = 8
"""A step is recorded only if at least this many more steps of the same shape follow."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Function
    qkv: Linear
    q_norm: Callable[[Tensor, slice], None] | None
    k_norm: Callable[[Tensor, slice], None] | None
    """Normalise a slice of the heads of queries, keys and values, in place."""
    o: Linear
    ffn_norm: Function
    ffn_inner: Function
    """Norm output to the input of `down`."""
    down: Linear


class Decoder:
    """A snapshot of a model's weights, laid out for decoding. After an update of the weights, create a new decoder.

    Args:
        dtype: of matrix products; None: autocast's if it is on, else the parameters'.
    """

    @torch.inference_mode()
    def __init__(self, model: Transformer, dtype: torch.dtype | None = None):
        self.config, self.device = model.config, model.embedding.weight.device
        stored = model.embedding.weight.dtype
        self.dtype = dtype or autocast_dtype(self.device) or stored
        self.stream = torch.promote_types(stored, torch.float32)
        ops = model.backend.decode_ops(self.device, self.dtype, self.stream)
        self.ops: TorchOps = ops or TorchOps(self.dtype, self.stream)
        index_D = torch.arange(self.config.head_size, device=self.device)
        self.pairs_D = index_D.view(2, -1).T.flatten() if self.config.positions == "rope" else index_D
        with torch.autocast(self.device.type, enabled=False):
            self.embedding = model.embedding.weight.detach()
            learned = model.position_embedding
            self.position_embedding = None if learned is None else learned.weight.detach()
            self.layers = [self._layer(block) for block in model.layers.values() if isinstance(block, Block)]
            self.norm = self.ops.norm(model.norm)
            self.head = self.ops.linear(self.embedding if model.head is None else model.head.weight)

    def _layer(self, block: Block) -> _Layer:
        ops, attention, ffn = self.ops, block.attention, block.ffn
        gated = isinstance(ffn, SwiGLU)
        return _Layer(
            attention_norm=ops.norm(block.attention_norm),
            qkv=ops.fused_linear([attention.q, attention.k, attention.v], self._qkv_order()),
            q_norm=None if attention.q_norm is None else ops.head_norm(attention.q_norm, self.pairs_D),
            k_norm=None if attention.k_norm is None else ops.head_norm(attention.k_norm, self.pairs_D),
            o=ops.fused_linear([attention.o]),
            ffn_norm=ops.norm(block.ffn_norm),
            ffn_inner=ops.swiglu(ffn.gate, ffn.up) if gated else ops.gelu(ffn.up, ffn.approximate),
            down=ops.fused_linear([ffn.down]),
        )

    def _qkv_order(self) -> Tensor:
        """The permutation of the concatenated q, k and v rows that makes rotary pairs adjacent."""
        rotated, values = self.config.heads + self.config.kv_heads, self.config.kv_heads
        row_ND = torch.arange((rotated + values) * len(self.pairs_D), device=self.device).view(-1, len(self.pairs_D))
        return torch.cat((row_ND[:rotated, self.pairs_D], row_ND[rotated:])).view(-1)

    def rope_table(self, positions: int) -> Tensor | None:
        """Rotations of the first positions as complex numbers, positions x E; None with learned positions."""
        config = self.config
        if config.positions != "rope":
            return None
        index_T = torch.arange(positions, device=self.device)[None]
        rope = make_rope(index_T, config.head_size, config.rope_theta, self.stream, config.rope_scaling)
        return torch.complex(rope.cos_BT1E[0, :, 0], rope.sin_BT1E[0, :, 0])

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """The residual stream before the first layer, M x W. Only learned positions are used."""
        x_BTW = self.embedding[ids_BT].to(self.stream)
        if self.position_embedding is not None:
            x_BTW = x_BTW + self.position_embedding[positions_BT]
        return x_BTW.view(ids_BT.numel(), -1)

    def forward(
        self,
        x_MW: Tensor,
        rows: int,
        attend: Callable[[int, Tensor], Tensor],
        output_N: Tensor | slice = slice(None),
    ) -> Tensor:
        """Hidden states N x W before the final norm.

        Args:
            x_MW: embedded tokens of all rows; overwritten.
            rows: B.
            attend: (layer, its queries, keys and values B x T x (H + 2K) x D before rotation) to B x T x (H D).
            output_N: indices of the tokens whose hidden states are returned; the last layer skips the others after
                attention.
        """
        config = self.config
        M, q, qk = len(x_MW), config.heads, config.heads + config.kv_heads
        for index, layer in enumerate(self.layers):
            qkv_BTND = layer.qkv(layer.attention_norm(x_MW).to(self.dtype)).to(self.stream)
            qkv_BTND = qkv_BTND.view(rows, M // rows, -1, config.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm(qkv_BTND, slice(0, q))
                layer.k_norm(qkv_BTND, slice(q, qk))
            attended_MV = attend(index, qkv_BTND).view(M, -1)
            if layer is self.layers[-1]:
                x_MW, attended_MV = x_MW[output_N], attended_MV[output_N]
            x_MW = layer.o(attended_MV.to(self.dtype), x_MW)
            inner_MF = layer.ffn_inner(layer.ffn_norm(x_MW).to(self.dtype))
            x_MW = layer.down(inner_MF.to(self.dtype), x_MW)
        return x_MW

    def logits(self, hidden_BW: Tensor) -> Tensor:
        """Hidden states before the final norm to logits B x V, in `dtype` or fp32."""
        return self.head(self.norm(hidden_BW).to(self.dtype))


class DecodeState:
    """A batch in generation: the KV cache of prompts and continuations, and the logits of the next tokens.

    Args:
        ids_BT: prompts, padded on the right.
        length_B: length of each prompt, on the same device.
        max_new: largest number of calls of `run`.
        samples: continuations per prompt, in adjacent rows; they share its prefill.
    """

    def __init__(self, decoder: Decoder, ids_BT: Tensor, length_B: Tensor, max_new: int, samples: int = 1):
        config, (B, T) = decoder.config, ids_BT.shape
        self.decoder = decoder
        self.length_B, self.prompt_slots, self.generated = length_B.repeat_interleave(samples), T, 0
        self.slots = T + max_new
        self.cache = KVCache(config, B * samples, self.slots, decoder.ops, decoder.device)
        self.rope_CE = decoder.rope_table(min(self.slots, config.context))
        self.bias_BC = self._padding_bias()
        step = max(1, _PREFILL_TOKENS // T)
        chunks = [slice(i, i + step) for i in range(0, B, step)]
        with torch.autocast(decoder.device.type, enabled=False):
            last_BW = torch.cat([self._prefill(ids_BT[rows], length_B[rows], rows, samples) for rows in chunks])
            self.logits_BV = decoder.logits(last_BW).repeat_interleave(samples, dim=0)
        """Logits of the next token of every row; the next `run` may overwrite them."""
        self._records = decoder.ops.records
        self._recorded: Callable[..., Tensor] | None = None
        self._recorded_shape: tuple[int, int] | None = None
        """(rows, slots read) of the recorded step."""

    def run(self, ids_B: Tensor) -> None:
        """Append a token to every row and compute the logits of the next ones."""
        slot = self.prompt_slots + self.generated
        self.cache.used = slot + 1
        with torch.autocast(self.decoder.device.type, enabled=False):
            if self._records:
                self.logits_BV = self._replay(ids_B, slot)
            else:
                self.logits_BV = self._step(ids_B, slot, self._bias(slot, slot + 1))
        self.generated += 1

    def _step(self, ids_B: Tensor, slot: int | Tensor, bias_BS: Tensor | None, slot_1: Tensor | None = None) -> Tensor:
        """Run the tokens of a slot; returns the logits of the next ones, B x V.

        Args:
            bias_BS: added to the scores of the first S slots.
            slot_1: the slot on the device, for recorded steps.
        """
        decoder = self.decoder
        last = decoder.config.context - 1  # rows that ended with a full context stay at the last position
        positions_B = (self.length_B + (slot - self.prompt_slots)).clamp_(max=last)
        rope_BE = None if self.rope_CE is None else self.rope_CE[positions_B]

        def attend(index: int, qkv_BTND: Tensor) -> Tensor:
            keys_BKCD, values_BKCD = self.cache.layer(index)
            return decoder.ops.attend(qkv_BTND[:, 0], rope_BE, keys_BKCD, values_BKCD, bias_BS, self.cache.used, slot_1)

        return decoder.logits(decoder.forward(decoder.embed(ids_B, positions_B), len(ids_B), attend))

    def _replay(self, ids_B: Tensor, slot: int) -> Tensor:
        """`_step` by replaying a recorded step.

        A recorded step reads a fixed number of slots, the next power of two, and masks those that are not written yet.
        It is recorded again when that number grows or rows are removed. The first step of each shape is not recorded,
        because it prepares the kernels.
        """
        read = min(self.slots, max(_MIN_SLOTS, 1 << slot.bit_length()))
        slot_1 = torch.full((1,), slot, device=ids_B.device)

        def step(ids_B: Tensor, slot_1: Tensor) -> Tensor:
            return self._step(ids_B, slot_1, self._bias(slot_1, read), slot_1)

        if self._recorded_shape != (len(ids_B), read):
            self._recorded_shape, self._recorded = (len(ids_B), read), None
        elif self._recorded is None and read - slot >= _RECORD_STEPS:
            try:
                self._recorded = self.decoder.ops.record(step, (ids_B, slot_1))
            except RuntimeError as error:  # recording computes nothing, so the step still has to run
                self._records = False
                warnings.warn(f"decoding without CUDA graphs, because recording a step failed: {error}", stacklevel=2)
        return (self._recorded or step)(ids_B, slot_1)

    def keep(self, rows: Tensor) -> None:
        """Remove all rows except these.

        Args:
            rows: indices, ascending.
        """
        self.cache.keep(rows)
        self._recorded = self._recorded_shape = None
        self.length_B = self.length_B[rows]
        self.bias_BC = None if self.bias_BC is None else self.bias_BC[rows]

    def _prefill(self, ids_BT: Tensor, length_B: Tensor, rows: slice, samples: int) -> Tensor:
        """Run some of the prompts; returns the hidden states of their last tokens, B x W."""
        decoder, T = self.decoder, ids_BT.shape[1]
        rope_TE = None if self.rope_CE is None else self.rope_CE[:T]
        cache_rows, window = slice(rows.start * samples, rows.stop * samples), decoder.config.window
        self.cache.used = T

        def attend(index: int, qkv_BTND: Tensor) -> Tensor:
            keys_RKCD, values_RKCD = self.cache.layer(index, cache_rows)
            return decoder.ops.attend_prompts(qkv_BTND, rope_TE, keys_RKCD, values_RKCD, window, samples)

        positions_BT = torch.arange(T, device=decoder.device).expand(ids_BT.shape)
        last_B = torch.arange(0, ids_BT.numel(), T, device=decoder.device) + length_B - 1
        return decoder.forward(decoder.embed(ids_BT, positions_BT), len(ids_BT), attend, last_B)

    def _bias(self, slot: int | Tensor, read: int) -> Tensor | None:
        """The bias of the scores of the first `read` slots: -inf at padding, after `slot` and before the window."""
        bias_BS, window = None if self.bias_BC is None else self.bias_BC[:, :read], self.decoder.config.window
        if isinstance(slot, int) and (window is None or slot < window):
            return bias_BS
        slots_S = torch.arange(read, device=self.length_B.device)
        hidden_BS = slots_S[None] > slot
        if window is not None:
            padding_B1 = self.prompt_slots - self.length_B[:, None]
            in_prompt_S = slots_S < self.prompt_slots
            hidden_BS = hidden_BS | (slots_S + torch.where(in_prompt_S, padding_B1, 0) <= slot - window)
        if bias_BS is None:
            bias_BS = torch.zeros(hidden_BS.shape, dtype=self.decoder.stream, device=hidden_BS.device)
        return bias_BS.masked_fill(hidden_BS, -torch.inf)

    def _padding_bias(self) -> Tensor | None:
        """-inf at the slots between the end of a prompt and that of the longest; None if all are of equal length."""
        slots_C = torch.arange(self.slots, device=self.length_B.device)
        padding_BC = (slots_C >= self.length_B[:, None]) & (slots_C < self.prompt_slots)
        if not padding_BC.any():
            return None
        bias_BC = torch.zeros(padding_BC.shape, dtype=self.decoder.stream, device=padding_BC.device)
        return bias_BC.masked_fill_(padding_BC, -torch.inf)
