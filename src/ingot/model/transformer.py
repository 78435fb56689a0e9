"""The decoder: embedding, pre-norm blocks of attention and feed-forward, final norm, head tied or untied.

The forward ends at the last hidden state and hands out the head as a function: `ops` calls it on as many positions as
fit a memory budget, so logits of B x T x V never exist at once. Parameter names follow Llama's (layers.N.attention.q,
layers.N.ffn.gate ...), so that exchanging checkpoints is a renaming (`hf.py`). Which norm, which feed-forward, which
positions is the config's choice, made once where a module is built: GPT-2, Llama, Mistral and Qwen are settings of this
one class.

The head of a tied model is the embedding matrix, used, not copied: a shared Parameter would break under `to_empty`,
sharding and safetensors.

Shapes: B rows, T positions, S keys, W width, V vocabulary, H heads.
"""

import math
import re
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ingot.kernels.precision import autocast_dtype, rounded
from ingot.model.attention import Attention, Path, bias, causal_mask, document_mask, faster, first_seen
from ingot.model.config import ModelConfig
from ingot.model.dropout import dropout
from ingot.model.feedforward import make_feedforward
from ingot.model.lm_head import Head
from ingot.model.norms import branch, make_norm
from ingot.model.rope import Rotation, rotation

_LINEAR_STD = 0.02  # GPT-2's; 0.5 / sqrt(W) = 0.044 was worse at W 128 (5.58 against 5.25, see _tied_std)
_UNTIED_EMBEDDING_STD = 0.1
_GAINS = ("attention_norm", "q_norm", "k_norm", "ffn_norm", "norm")
_MATRICES = ("q", "k", "v", "gate", "up", "position_embedding")


class ModelOut(NamedTuple):
    """What a forward gives: a tuple, so that wrappers which look for tensors in outputs find them."""

    hidden: Tensor
    """B x T x W, after the final norm."""
    head: Head
    """Hidden states ... x W to logits ... x V."""
    taps: dict[str, Tensor]
    """What the caller asked for by name."""

    @property
    def logits(self) -> Tensor:
        """All of them at once, B x T x V: for looking at short rows."""
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
        self,
        x_BTW: Tensor,
        turn: Rotation | None,
        mask_BTS: Tensor | None,
        path: Path,
        tapped: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        x_BTW, normed_BTW = branch(self.attention_norm, x_BTW)
        mixed_BTW, p_BHTS = self.attention(normed_BTW, turn, mask_BTS, path, tapped)
        x_BTW, normed_BTW = branch(self.ffn_norm, x_BTW + dropout(mixed_BTW, self.dropout, self.training))
        return x_BTW + dropout(self.ffn(normed_BTW), self.dropout, self.training), p_BHTS


class Transformer(nn.Module):
    """A decoder-only language model of the given shape, its parameters uninitialised until `init_weights`."""

    head_type = Head
    """How the head computes what labels cost."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.attention_path: Path | None = None
        """How attention is computed, not what; None: as is faster here."""
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
        """Hidden states of a batch.

        Args:
            ids_BT: token ids.
            positions_BT: default: 0 .. T-1 in every document. Rotary positions may start anywhere, since only their
                differences matter; learned ones must be less than the context.
            documents_BT: which document a token belongs to, any integers, a document's tokens side by side; tokens
                see their own document only. None: the whole row is one document.
            taps: "hidden.N" (the stream before block N; N = depth is what the final norm reads), "attention.N" (the
                probabilities of block N, B x H x T x S; scores are written out there).
        """
        wanted = _parse_taps(taps, self.config.depth)
        path = self._path(ids_BT)
        mask_BTS = self._mask(ids_BT, documents_BT, path)
        if positions_BT is None and self.position_embedding is not None and documents_BT is not None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] - _starts(documents_BT)
        x_BTW, turn = self._embed(ids_BT, positions_BT)
        hidden_BTW, found = self.stack(x_BTW, turn, mask_BTS, path, wanted)
        head = self.head_type(self.embedding.weight if self.head is None else self.head.weight)
        return ModelOut(hidden_BTW, head, found)

    def stack(
        self,
        x_BTW: Tensor,
        turn: Rotation | None,
        mask_BTS: Tensor | None,
        path: Path,
        wanted: Collection[tuple[str, int]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All blocks and the last norm, and the taps: what is compiled as a whole.

        Embedding, angles and mask are made outside of it, since a compiler computes cosines anew in every kernel that
        reads them and adds an embedding's gradients up atomically.
        """
        found: dict[str, Tensor] = {}
        for i, block in enumerate(self.layers.values()):
            if ("hidden", i) in wanted:
                found[f"hidden.{i}"] = x_BTW
            x_BTW, p_BHTS = block(x_BTW, turn, mask_BTS, path, ("attention", i) in wanted)
            if ("attention", i) in wanted:
                found[f"attention.{i}"] = p_BHTS
        if ("hidden", self.config.depth) in wanted:
            found[f"hidden.{self.config.depth}"] = x_BTW
        return self.norm(x_BTW), found

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Of what attention multiplies."""
        return autocast_dtype(device) or self.norm.weight.dtype

    def _path(self, ids_BT: Tensor) -> Path:
        if self.attention_path is not None:
            return self.attention_path
        device, share = ids_BT.device, self.config.dropout if self.training else 0.0
        return faster(device, self._dtype(device), ids_BT.shape[1], share)

    def _mask(self, ids_BT: Tensor, documents_BT: Tensor | None, path: Path) -> Tensor | None:
        """What every query may see, as blocks read it fastest; None: all before it, which their kernel knows."""
        (_, T), window, device = ids_BT.shape, self.config.window, ids_BT.device
        if window is not None and window >= T:
            window = None
        if path == "native":
            return first_seen(None if documents_BT is None else _starts(documents_BT), T, window)
        if documents_BT is None and window is None and path == "sdpa":
            return None
        mask_BTS = causal_mask(T, window, device)[None] if documents_BT is None else document_mask(documents_BT, window)
        return bias(mask_BTS, self._dtype(device)) if path == "plain" else mask_BTS

    def _embed(self, ids_BT: Tensor, positions_BT: Tensor | None) -> tuple[Tensor, Rotation | None]:
        """The stream before the first block, and the angles of this forward where positions are rotary.

        Args:
            positions_BT: None: those of the row; learned ones are not looked up then, whose gradient a GPU would sort.
        """
        config, turn, T = self.config, None, ids_BT.shape[1]
        x_BTW = self.embedding(ids_BT)
        if self.position_embedding is not None:
            assert config.context >= T, f"{T} tokens in a context of {config.context}"
            first_TW = self.position_embedding.weight[:T]
            x_BTW = x_BTW + (first_TW if positions_BT is None else self.position_embedding(positions_BT))
        else:
            if positions_BT is None:
                positions_BT = torch.arange(T, device=ids_BT.device)[None]
            turn = rotation(positions_BT, config.head_size, config.rope_theta, x_BTW.dtype, config.rope_scaling)
        # On a GPU the stream is as wide as what is multiplied, so norms and sums move half as much (GPT-2's 124M, H100:
        # 35.6 to 34.0 ms a step). On a CPU nothing is gained by that.
        x_BTW = rounded(x_BTW) if x_BTW.is_cuda else x_BTW
        return dropout(x_BTW, config.dropout, self.training), turn

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set every parameter; the values depend on the generator's seed and the shapes, not on device or dtype."""
        for name, parameter in self.named_parameters():
            std = self._std(name)
            if std is None:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.copy_(noise.mul_(std))
            assert torch.isfinite(parameter).all(), f"{name} is not finite after initialisation"

    def _std(self, name: str) -> float | None:
        """Standard deviation a parameter starts with; None: it is a gain, which starts at 1, or a bias, at 0."""
        kind, role = name.split(".")[-2:]
        if kind == "head":
            return 1 / self.config.width
        if kind == "embedding":
            return _tied_std(self.config.vocab, self.config.width) if self.config.tied else _UNTIED_EMBEDDING_STD
        assert kind in (*_GAINS, *_MATRICES, "o", "down"), f"no initialisation is known for {name}"
        if role == "bias" or kind in _GAINS:
            return None
        return _LINEAR_STD / math.sqrt(2 * self.config.depth) if kind in ("o", "down") else _LINEAR_STD


def _tied_std(vocab: int, width: int) -> float:
    """As large as a first loss of ln V allows, since a tied model learns slower from a smaller embedding.

    Logits of a tied head have variance W s^2, which costs W s^2 / 2 nats, and they favour the token just read, by up to
    W s where the embedding dominates the stream, which costs the more the fewer tokens there are: hence the fourth root
    of V. Worst first loss over V 4 to 1,024, W 16 to 1,024, depths 1 and 4, two seeds: 0.040 nats off. N(0, 0.02)
    starts 0.19 too high at W 768, V 50,257 and 0.24 at W 1,024, V 65.

    Validation loss and excess of the first loss, Python source, V 2,048, W 128, 4 layers, one seed. 150 steps of 2,048
    tokens: 0.02 everywhere 5.285 (+0.029); 0.2 / sqrt W 5.300 (+0.022); 0.14 / sqrt W 5.486 (+0.010); 0.02 with the
    last norm's gain started at 0.7 5.440 (+0.014); untied with embedding 0.1 5.301, 0.5 5.396 (+0.007). 200 steps of
    4,096: tied 0.02 4.716; 1 / W 5.246; gain at 0.1 5.784; untied with embedding 0.02 4.667, 0.1 4.604. A small gain is
    the worst way to a small head: Adam moves it by the learning rate, however far it has to go.
    """
    return min(0.02, 0.19 * min(1.0, vocab / 256) ** 0.25 / math.sqrt(width))


def empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """A model of that shape with memory but no values."""
    with torch.device("meta"):
        model = Transformer(config)
    for module in model.modules():  # `to_empty` does it by code that imports sympy
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


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Without values: `nn.Embedding` draws some, on the meta device by code that imports torch's compiler (1 s)."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _starts(documents_BT: Tensor) -> Tensor:
    """Where the document of each token begins in its row, B x T."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT != documents_BT.roll(1, dims=1)
    return (index_T * begins_BT).cummax(dim=1).values


def _parse_taps(taps: frozenset[str], depth: int) -> tuple[tuple[str, int], ...]:
    wanted = []
    for name in taps:
        match = re.fullmatch(r"(hidden|attention)\.(\d+)", name)
        last = depth if name.startswith("hidden") else depth - 1
        if match is None or int(match[2]) > last:
            raise ValueError(
                f"tap '{name}' names nothing in a model of {depth} layers; "
                f"use hidden.0 to hidden.{depth} or attention.0 to attention.{depth - 1}"
            )
        wanted.append((match[1], int(match[2])))
    return tuple(sorted(wanted))
