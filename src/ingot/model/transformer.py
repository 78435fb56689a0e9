"""The decoder: embedding, pre-norm blocks of attention and feed-forward, final norm, and a head that may be tied.

The forward pass ends at the last hidden state and returns the head as an object: losses (`losses.py`) call it on as
many positions as fit a memory budget, so logits of B x T x V never exist at once. Parameter names follow Llama's
(layers.N.attention.q, layers.N.ffn.gate ...), so exchanging checkpoints is a renaming (`convert/`). GPT-2, Llama,
Mistral and Qwen are settings of this one class.

The head of a tied model is the embedding matrix itself and not a second Parameter, which would break under `to_empty`,
sharding and safetensors.

Shapes: B rows, T positions, S keys, W width, V vocabulary, H heads.
"""

import math
import re
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.attention import Attention, Mask
from ingot.model.backend import TORCH, Backend, Taps
from ingot.model.config import ModelConfig
from ingot.model.feedforward import make_feedforward
from ingot.model.lm_head import LMHead
from ingot.model.norms import make_norm
from ingot.model.precision import to_autocast
from ingot.model.rope import Rope, make_rope

_LINEAR_STD = 0.02  # GPT-2's
_UNTIED_EMBEDDING_STD = 0.1
_NORMS = ("attention_norm", "q_norm", "k_norm", "ffn_norm", "norm")
_MATRICES = ("q", "k", "v", "gate", "up", "position_embedding")


class ModelOut(NamedTuple):
    """The result of a forward pass; a tuple, so that wrappers which look for tensors in outputs find them."""

    hidden: Tensor
    """B x T x W, after the final norm."""
    head: LMHead
    """Hidden states ... x W to logits ... x V."""
    taps: dict[str, Tensor]
    """The tensors that the caller asked for by name."""

    @property
    def logits(self) -> Tensor:
        """All logits at once, B x T x V: for looking at short rows."""
        return self.head(self.hidden)


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config, config.width)
        self.attention = Attention(config)
        self.ffn_norm = make_norm(config, config.width)
        self.ffn = make_feedforward(config)

    def forward(
        self, x_BTW: Tensor, rope: Rope | None, mask: Mask, tapped: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after the block, and where `tapped` the attention probabilities B x H x T x S."""
        attended_BTW, p_BHTS = self.attention(self.attention_norm(x_BTW), rope, mask, tapped)
        x_BTW = x_BTW + F.dropout(attended_BTW, self.dropout, self.training)
        return x_BTW + F.dropout(self.ffn(self.ffn_norm(x_BTW)), self.dropout, self.training), p_BHTS


class Transformer(nn.Module):
    """A decoder-only language model; its parameters have no values until `init_weights`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.backend: Backend = TORCH
        self.embedding = _embedding(config.vocab, config.width)
        learned = config.positions == "learned"
        self.position_embedding = _embedding(config.context, config.width) if learned else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.depth)})
        self.norm = make_norm(config, config.width)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        taps: frozenset[str] = frozenset(),
    ) -> ModelOut:
        """Hidden states of a batch, and the head.

        Args:
            ids_BT: token ids.
            positions_BT: default: 0 .. T-1 in every document. Rotary positions may start anywhere, since only their
                differences matter; learned ones must be less than the context.
            documents_BT: the document of each token, any integers, a document's tokens side by side. Tokens attend to
                their own document only. None: a row is one document.
            taps: "hidden.N" (the stream before block N; N = depth is the input of the final norm) or "attention.N"
                (the probabilities of block N, B x H x T x S).
        """
        wanted = parse_taps(taps, self.config.depth)
        backend = self.backend if self.backend.supports(self, ids_BT, wanted) else TORCH
        mask = backend.mask(self, documents_BT, ids_BT.shape[1])
        if positions_BT is None and self.position_embedding is not None and documents_BT is not None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] - document_starts(documents_BT)
        x_BTW, rope = self.embed(ids_BT, positions_BT)
        hidden_BTW, tapped = backend.blocks(self, x_BTW, rope, mask, wanted)
        head = backend.lm_head(self.embedding.weight if self.head is None else self.head.weight)
        return ModelOut(hidden_BTW, head, tapped)

    def embed(self, ids_BT: Tensor, positions_BT: Tensor | None = None) -> tuple[Tensor, Rope | None]:
        """The stream before the first block, B x T x W, and the angles where positions are rotary.

        Args:
            positions_BT: None: 0 .. T-1 in every row.
        """
        config, rope, T = self.config, None, ids_BT.shape[1]
        x_BTW = self.embedding(ids_BT)
        if self.position_embedding is not None:
            assert config.context >= T, f"{T} tokens in a context of {config.context}"
            first_TW = self.position_embedding.weight[:T]
            x_BTW = x_BTW + (first_TW if positions_BT is None else self.position_embedding(positions_BT))
        else:
            if positions_BT is None:
                positions_BT = torch.arange(T, device=ids_BT.device)[None]
            rope = make_rope(positions_BT, config.head_size, config.rope_theta, x_BTW.dtype, config.rope_scaling)
        if x_BTW.is_cuda:  # a stream in 16 bits halves what norms and sums read (5 % of a step of GPT-2 on an H100)
            x_BTW = to_autocast(x_BTW)
        return F.dropout(x_BTW, config.dropout, self.training), rope

    def run_blocks(
        self, x_BTW: Tensor, rope: Rope | None, mask: Mask, taps: Taps = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All blocks and the last norm; called by a backend, which may have compiled it."""
        tapped: dict[str, Any] = {}
        for i, block in enumerate(self.layers.values()):
            if ("hidden", i) in taps:
                tapped[f"hidden.{i}"] = x_BTW
            x_BTW, p_BHTS = block(x_BTW, rope, mask, ("attention", i) in taps)
            if ("attention", i) in taps:
                tapped[f"attention.{i}"] = p_BHTS
        if ("hidden", self.config.depth) in taps:
            tapped[f"hidden.{self.config.depth}"] = x_BTW
        return self.norm(x_BTW), tapped

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set every parameter; values depend on the generator's seed and the shapes, not on device or dtype."""
        for name, parameter in self.named_parameters():
            std = self._std(name)
            if std is None:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.copy_(noise.mul_(std))
            assert torch.isfinite(parameter).all(), f"{name} is not finite after initialisation"

    def _std(self, name: str) -> float | None:
        """Initial standard deviation of a parameter; None: a gain, which starts at 1, or a bias, at 0."""
        module, role = name.split(".")[-2:]
        if module == "head":
            return 1 / self.config.width
        if module == "embedding":
            return _tied_std(self.config.vocab, self.config.width) if self.config.tied else _UNTIED_EMBEDDING_STD
        assert module in (*_NORMS, *_MATRICES, "o", "down"), f"no initialisation is known for {name}"
        if role == "bias" or module in _NORMS:
            return None
        return _LINEAR_STD / math.sqrt(2 * self.config.depth) if module in ("o", "down") else _LINEAR_STD


def _tied_std(vocab: int, width: int) -> float:
    """The largest standard deviation of a tied embedding at which the first loss is still ln V.

    Logits of a tied head have variance W s^2, which costs W s^2 / 2 nats, and favour the token just read by up to W s.
    Over V 4 to 1,024 and W 16 to 1,024 the first loss is at most 0.04 nats off (figures: docs/archive/2026-11.md).
    """
    return min(0.02, 0.19 * min(1.0, vocab / 256) ** 0.25 / math.sqrt(width))


def empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """A model of that shape with memory but no values."""
    with torch.device("meta"):
        model = Transformer(config)
    for module in model.modules():  # `to_empty` would import sympy
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
    return model


def build(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model with initialised weights, allocated once on its device."""
    model = empty(config, device, dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def document_starts(documents_BT: Tensor) -> Tensor:
    """The position in its row at which the document of each token begins, B x T."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT != documents_BT.roll(1, dims=1)
    return (index_T * begins_BT).cummax(dim=1).values


def parse_taps(taps: frozenset[str], depth: int) -> Taps:
    """Names of taps as ("hidden" or "attention", block).

    Raises:
        ValueError: a name means nothing in a model of that depth.
    """
    wanted = []
    for name in taps:
        match = re.fullmatch(r"(hidden|attention)\.(\d+)", name)
        last = depth if name.startswith("hidden") else depth - 1
        if match is None or int(match[2]) > last:
            raise ValueError(
                f"tap '{name}' does not exist in a model of {depth} layers; "
                f"use hidden.0 to hidden.{depth} or attention.0 to attention.{depth - 1}"
            )
        wanted.append((match[1], int(match[2])))
    return tuple(sorted(wanted))


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without values: `nn.Embedding` draws some, on the meta device by importing torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
