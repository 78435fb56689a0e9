"""The decoder: embedding, pre-norm blocks of attention and feed-forward, final norm, and a tied or untied LM head.

GPT-2, Llama, Mistral and Qwen are configurations of this one class. Parameter names follow Llama's
(layers.N.attention.q, layers.N.ffn.gate ...), so converting a checkpoint means renaming its tensors (`convert/`).

`forward` returns the last hidden states and the head, not logits. Losses (`losses.py`) apply the head to as many
positions as fit a memory budget, so the B x T x V logits never exist at once.

A tied head is the embedding matrix itself. A second Parameter of the same tensor would break under `to_empty`, sharding
and safetensors.

Shapes: B rows, T positions, S keys, W width, V vocabulary, H heads.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.attention import Attention, Mask
from ingot.model.backend import TORCH, Backend, Taps
from ingot.model.checkpointing import checkpointed
from ingot.model.config import Checkpointing, ModelConfig, segment_blocks
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
    """The result of a forward pass; a tuple, so that wrappers that search outputs for tensors find them."""

    hidden: Tensor
    """B x T x W, after the final norm."""
    head: LMHead
    """Maps hidden states ... x W to logits ... x V."""
    taps: dict[str, Tensor]
    """Requested intermediate tensors by name; see `Transformer.forward`."""

    @property
    def logits(self) -> Tensor:
        """All logits at once, B x T x V; use it for short rows only."""
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
        self, x_BTW: Tensor, rope: Rope | None, mask: Mask, taps: Collection[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The residual stream after the block, and the tensors of `taps` (`Attention.forward`) by name."""
        attended_BTW, tapped = self.attention(self.attention_norm(x_BTW), rope, mask, taps)
        x_BTW = x_BTW + F.dropout(attended_BTW, self.dropout, self.training)
        return x_BTW + F.dropout(self.ffn(self.ffn_norm(x_BTW)), self.dropout, self.training), tapped


class Transformer(nn.Module):
    """A decoder-only language model. Parameters are uninitialised until `build` or a checkpoint sets them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.backend: Backend = TORCH
        self.checkpointing: Checkpointing = "none"
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
            positions_BT: position of each token; default: 0 .. T-1 in every document. Rotary positions may start at any
                number, since only differences matter; learned ones must be less than the context.
            documents_BT: document number of each token; the tokens of a document are contiguous. Tokens attend to
                their own document only. None: each row is one document.
            taps: names of intermediate tensors to return: "hidden.N" (the residual stream before block N; N = depth is
                the input of the final norm), or of block N "attention.N" (probabilities, B x H x T x S), "query.N",
                "key.N" and "value.N" (as attention reads them, B x heads x T x features).

        Raises:
            ValueError: the model has no tap of that name.
        """
        requested = parse_taps(taps, self.config.depth)
        backend = self.backend if self.backend.supports(self, ids_BT, requested) else TORCH
        mask = backend.mask(self, documents_BT, ids_BT.shape[1])
        if positions_BT is None and self.position_embedding is not None and documents_BT is not None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] - document_starts(documents_BT)
        x_BTW, rope = self.embed(ids_BT, positions_BT)
        hidden_BTW, tapped = backend.blocks(self, x_BTW, rope, mask, requested)
        head = backend.lm_head(self.embedding.weight if self.head is None else self.head.weight)
        return ModelOut(hidden_BTW, head, tapped)

    def embed(self, ids_BT: Tensor, positions_BT: Tensor | None = None) -> tuple[Tensor, Rope | None]:
        """The residual stream before the first block, B x T x W, and the rotary angles (None with learned positions).

        Args:
            positions_BT: position of each token; None: 0 .. T-1 in every row.
        """
        config, rope, T = self.config, None, ids_BT.shape[1]
        x_BTW = self.embedding(ids_BT)
        if self.position_embedding is not None:
            assert config.context >= T, f"{T} tokens exceed the context of {config.context}"
            first_TW = self.position_embedding.weight[:T]
            x_BTW = x_BTW + (first_TW if positions_BT is None else self.position_embedding(positions_BT))
        else:
            if positions_BT is None:
                positions_BT = torch.arange(T, device=ids_BT.device)[None]
            rope = make_rope(positions_BT, config.head_size, config.rope_theta, x_BTW.dtype, config.rope_scaling)
        if x_BTW.is_cuda:  # a 16-bit residual stream halves the memory traffic of norms and residual additions
            x_BTW = to_autocast(x_BTW)
        return F.dropout(x_BTW, config.dropout, self.training), rope

    def run_blocks(
        self,
        x_BTW: Tensor,
        rope: Rope | None,
        mask: Mask,
        taps: Taps = (),
        checkpointing: Checkpointing = "none",
        run_block: Callable[..., tuple[Tensor, dict[str, Tensor]]] = nn.Module.__call__,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All blocks and the final norm. Backends call it, perhaps compiled.

        Args:
            checkpointing: which activations the backward pass computes again.
            run_block: computes a block, given the block and the arguments of `Block.forward`.
        """

        def run(first: int, x_BTW: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            tapped: dict[str, Tensor] = {}
            for i, block in blocks[first : first + segment]:
                if ("hidden", i) in taps:
                    tapped[f"hidden.{i}"] = x_BTW
                inside = tuple(name for name, n in taps if n == i and name != "hidden")
                x_BTW, of_block = run_block(block, x_BTW, rope, mask, inside)
                tapped |= {f"{name}.{i}": tensor for name, tensor in of_block.items()}
            return x_BTW, tapped

        blocks, tapped = list(enumerate(self.layers.values())), {}
        segment, stored = segment_blocks(checkpointing, len(blocks)), checkpointing == "none"
        run_segment = run if stored else checkpointed(run, self, checkpointing == "selective")
        for first in range(0, len(blocks), segment):
            x_BTW, of_segment = run_segment(first, x_BTW)
            tapped |= of_segment
            if not stored:
                torch.clear_autocast_cache()  # it has copies of the weights
        if ("hidden", self.config.depth) in taps:
            tapped[f"hidden.{self.config.depth}"] = x_BTW
        return self.norm(x_BTW), tapped

    def initial_weights(self, generator: torch.Generator) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its initial value in fp32, one after another, so that only one is in memory at a time.

        Values depend on the generator's seed and the shapes, not on the model's device, dtype or ranks.
        """
        for name, parameter in self.named_parameters():
            std = self._std(name)
            if std is None:
                yield parameter, torch.full(parameter.shape, 0.0 if name.endswith(".bias") else 1.0)
            else:
                yield parameter, torch.randn(parameter.shape, generator=generator).mul_(std)

    def _std(self, name: str) -> float | None:
        """Initial standard deviation of a parameter; None for gains, which start at 1, and biases, which start at 0."""
        module, role = name.split(".")[-2:]
        if module == "head":
            return 1 / self.config.width
        if module == "embedding":
            return _tied_std(self.config.vocab, self.config.width) if self.config.tied else _UNTIED_EMBEDDING_STD
        assert module in (*_NORMS, *_MATRICES, "o", "down"), f"no initialisation is defined for {name}"
        if role == "bias" or module in _NORMS:
            return None
        return _LINEAR_STD / math.sqrt(2 * self.config.depth) if module in ("o", "down") else _LINEAR_STD


def _tied_std(vocab: int, width: int) -> float:
    """The largest standard deviation of a tied embedding at which the first loss is still ln V.

    With standard deviation s, logits of a tied head have variance W s^2, which costs W s^2 / 2 nats, and favour the
    token just read by up to W s. For V of 4 to 1,024 and W of 16 to 1,024 the first loss is within 0.04 nats of ln V
    (docs/archive/2026-11.md).
    """
    return min(0.02, 0.19 * min(1.0, vocab / 256) ** 0.25 / math.sqrt(width))


def empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """An uninitialised model, allocated on its device."""
    with torch.device("meta"):
        model = Transformer(config)
    for module in model.modules():  # `Module.to_empty` does the same but imports sympy, which is slow
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
    return model


def build(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """An initialised model. The same seed gives the same weights on every device."""
    model = empty(config, device, dtype)
    with torch.no_grad():
        for parameter, value in model.initial_weights(torch.Generator().manual_seed(seed)):
            parameter.copy_(value)
    return model


def take_layers(model: Transformer, layers: Sequence[int]) -> None:
    """Leave a model the given blocks, in that order, renumbered from 0."""
    model.layers = nn.ModuleDict({str(i): model.layers[str(n)] for i, n in enumerate(layers)})
    model.config = model.config.model_copy(update={"depth": len(layers)})


def document_starts(documents_BT: Tensor) -> Tensor:
    """For each token, the index in its row of the first token of its document, B x T."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT != documents_BT.roll(1, dims=1)
    return (index_T * begins_BT).cummax(dim=1).values


def parse_taps(taps: frozenset[str], depth: int) -> Taps:
    """Tap names as pairs (name, block).

    Raises:
        ValueError: a model of that depth has no tap of that name.
    """
    parsed = []
    for name in taps:
        match = re.fullmatch(r"(hidden|attention|query|key|value)\.(\d+)", name)
        last = depth if name.startswith("hidden") else depth - 1
        if match is None or int(match[2]) > last:
            raise ValueError(
                f"tap '{name}' does not exist in a model of {depth} layers; "
                f"use hidden.0 to hidden.{depth}, or attention, query, key or value .0 to .{depth - 1}"
            )
        parsed.append((match[1], int(match[2])))
    return tuple(sorted(parsed))


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An uninitialised embedding. `nn.Embedding(...)` initialises itself, which on the meta device imports dynamo."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
