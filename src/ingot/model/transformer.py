"""The decoder: embedding, pre-norm blocks (RMSNorm, rotary attention, SwiGLU), final norm, head tied or untied.

The forward ends at the last hidden state and hands out the head as a function: `ops` calls it on as many positions as
fit a memory budget, so logits of B x T x V never exist at once. Parameter names follow Llama's (layers.N.attention.q,
layers.N.ffn.gate ...), so that exchanging checkpoints is a renaming.

The head of a tied model is the embedding matrix, used, not copied: a shared Parameter would break under `to_empty`,
sharding and safetensors.

Shapes: B rows, T positions, S keys, W width, V vocabulary, H heads.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.attention import Attention, KVCache, Path, Rotation, document_mask, rotation
from ingot.model.settings import ModelConfig


class ModelOut(NamedTuple):
    """What a forward gives: a tuple, so that wrappers which look for tensors in outputs find them."""

    hidden: Tensor
    """B x T x W, after the final norm."""
    head: Callable[[Tensor], Tensor]
    """Hidden states ... x W to logits ... x V."""
    taps: dict[str, Tensor]
    """What the caller asked for by name."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, index)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self,
        x_BTW: Tensor,
        turn: Rotation,
        mask_BTS: Tensor | None,
        cache: tuple[KVCache, Tensor] | None,
        path: Path,
    ) -> tuple[Tensor, Tensor | None]:
        mixed_BTW, p_BHTS = self.attention(self.attention_norm(x_BTW), turn, mask_BTS, cache, path)
        x_BTW = x_BTW + mixed_BTW
        return x_BTW + self.ffn(self.ffn_norm(x_BTW)), p_BHTS


class Transformer(nn.Module):
    """A decoder-only language model of the given shape, its parameters uninitialised until `init_weights`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.attention_path: Path = "auto"
        """How attention is computed, not what: an execution choice that tests and `execution` may set."""
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.depth)})
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
        taps: frozenset[str] = frozenset(),
    ) -> ModelOut:
        """Hidden states of a batch.

        Args:
            ids_BT: token ids.
            positions_BT: rotary positions; default 0 .. T-1, or what follows the cache. Only differences matter.
            documents_BT: which document a token belongs to, any integers; tokens see their own document only. None:
                the whole row is one document.
            cache: keys and values of earlier tokens; read, extended by these T tokens, and advanced.
            taps: "hidden.N" (the stream before block N; N = depth is what the final norm reads), "attention.N" (the
                probabilities of block N, B x H x T x S; takes the plain path there).
        """
        T = ids_BT.shape[1]
        wanted = _parse_taps(taps, self.config.depth)
        mask_BTS, stored = None if documents_BT is None else document_mask(documents_BT), None
        if cache is not None:
            assert documents_BT is None, "a cached row is one document"
            assert positions_BT is None, "a cache knows its own positions"
            positions_BT = cache.positions(T)
            stored = (cache, positions_BT)
            if cache.end > 0:
                keys_S = torch.arange(cache.end + T, device=ids_BT.device)
                mask_BTS = keys_S <= positions_BT[:, :, None]
        if positions_BT is None:
            positions_BT = torch.arange(T, device=ids_BT.device)[None]
        x_BTW = self.embedding(ids_BT)
        turn = rotation(positions_BT, self.config.head_size, self.config.rope_theta, x_BTW.dtype)
        found: dict[str, Tensor] = {}
        for i, block in enumerate(self.layers.values()):
            if ("hidden", i) in wanted:
                found[f"hidden.{i}"] = x_BTW
            path = "plain" if ("attention", i) in wanted else self.attention_path
            x_BTW, p_BHTS = block(x_BTW, turn, mask_BTS, stored, path)
            if ("attention", i) in wanted:
                found[f"attention.{i}"] = p_BHTS
        if ("hidden", self.config.depth) in wanted:
            found[f"hidden.{self.config.depth}"] = x_BTW
        if cache is not None:
            cache.advance(T)
        return ModelOut(self.norm(x_BTW), self.logits, found)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: ... x W to ... x V."""
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set every parameter; the values depend on the generator's seed and the shapes, not on device or dtype."""
        for name, parameter in self.named_parameters():
            std = self._std(name)
            if std is None:
                parameter.fill_(1.0)
            else:
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.copy_(noise.mul_(std))
            assert torch.isfinite(parameter).all(), f"{name} is not finite after initialisation"

    def _std(self, name: str) -> float | None:
        width, kind = self.config.width, name.split(".")[-2]
        if kind in ("attention_norm", "ffn_norm", "norm"):
            return None
        if kind in ("embedding", "head"):
            return self.INIT[kind](width, self.config.tied)
        base = self.INIT["linear"](width, self.config.tied)
        if kind in ("o", "down"):
            return base / math.sqrt(2 * self.config.depth)
        assert kind in ("q", "k", "v", "gate", "up"), f"no initialisation is known for {name}"
        return base

    INIT = {"embedding": lambda w, t: 1 / w if t else 0.02, "head": lambda w, t: 1 / w, "linear": lambda w, t: 0.02}


def build(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model with initialised weights, allocated once on its device."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to(dtype).to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def _parse_taps(taps: frozenset[str], depth: int) -> set[tuple[str, int]]:
    wanted = set()
    for name in taps:
        match = re.fullmatch(r"(hidden|attention)\.(\d+)", name)
        last = depth if name.startswith("hidden") else depth - 1
        if match is None or int(match[2]) > last:
            raise ValueError(
                f"tap '{name}' names nothing in a model of {depth} layers; "
                f"use hidden.0 to hidden.{depth} or attention.0 to attention.{depth - 1}"
            )
        wanted.add((match[1], int(match[2])))
    return wanted
