"""The shape of a model: `ModelSettings` in a recipe, `ModelConfig` in a checkpoint.

A recipe sets a depth or a parameter count. Every width follows from the depth and every architectural choice from the
family; each can be overridden. `ModelSettings.resolve` turns the settings into a `ModelConfig` once the vocabulary size
is known. All fields of a `ModelConfig` are required, so a checkpoint never depends on the defaults of the version that
reads it.

A family is a row of defaults (`FAMILIES`), not a class: there is one transformer, and any computable combination of the
fields is allowed. No torch, because `ingot plan` prints shapes without loading it.
"""

import math
import re
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from ingot.core.errors import UserError
from ingot.core.settings import Settings
from ingot.core.validation import problems

WIDTH_PER_LAYER = 64
_HEAD_SIZES = (64, 32, 16, 8)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
_MAX_SEARCH_DEPTH = 256
"""Largest depth that `size` can resolve to."""
MAX_DEPTH = 10_000
"""Largest number of blocks that is accepted: a mistyped depth is an error, not an exhausted memory."""
MAX_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Elements of logits in memory at a time: 128 MiB in bf16 on a CPU, 2 GiB on a GPU."""
SOFTMAX_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements of logits that one fp32 softmax processes: as many as a core's cache holds, or as fill a GPU."""
EAGER_BF16_KEYS = 512
"""Attention in bf16 on a CPU is eager up to this number of keys (`attention.fastest_impl`)."""

Checkpointing = Literal["none", "full", "sqrt", "selective"] | Annotated[int, Field(strict=True, ge=1)]
"""Which activations the backward pass computes again (`checkpointing.py`); a number: blocks of a segment."""

Family = Literal["llama", "gpt2", "mistral", "qwen2", "qwen3"]
Positions = Literal["rope", "learned"]
Norm = Literal["rms", "layer"]
Activation = Literal["swiglu", "gelu", "gelu-tanh"]
Bias = Literal["none", "qkv", "all"]


class RopeScaling(Settings):
    """Llama 3's scaling of rotary frequencies: low ones divided by `factor`, high ones unchanged, a ramp in between."""

    factor: float = Field(ge=1)
    """Divisor of the low frequencies: by how much the context grows."""
    low_freq_factor: PositiveFloat
    """Frequencies with fewer rotations than this within `original_context` are divided by `factor`."""
    high_freq_factor: PositiveFloat
    """Frequencies with more rotations than this within `original_context` are unchanged."""
    original_context: PositiveInt
    """Longest sequence of the model before scaling, in tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"found low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}, expected "
                "the first to be smaller; Llama 3 has 1 and 4"
            )
        return self


def max_context(context: int, scaling: RopeScaling | None) -> int:
    """Longest context that training may extend a model of `context` to: its own, or what its RoPE scaling reaches."""
    return max(context, int(scaling.original_context * scaling.factor)) if scaling else context


class ModelConfig(Settings):
    """A model's fully resolved shape; saved in checkpoints."""

    vocab: PositiveInt
    """Number of token ids."""
    depth: int = Field(ge=1, le=MAX_DEPTH)
    """Number of blocks."""
    width: PositiveInt
    """Features of the residual stream."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt
    """Number of key and value heads, each shared by heads / kv_heads query heads."""
    head_size: PositiveInt
    """Features of one head; heads x head_size need not equal the width."""
    ffn: PositiveInt
    """Inner size of the feed-forward."""
    context: PositiveInt
    """Longest sequence in tokens."""
    tied: bool
    """Whether the LM head is the embedding matrix."""
    positions: Positions
    """Rotary angles, or a learned table of `context` rows that is added to the embedding."""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies; unused with learned positions."""
    rope_scaling: RopeScaling | None
    """Scaling of the rotary frequencies for a longer context; None: none."""
    window: PositiveInt | None
    """Number of tokens that a token attends to, itself included; None: all earlier ones."""
    norm: Norm
    """RMSNorm or LayerNorm."""
    norm_eps: PositiveFloat
    """Added to the mean square (for LayerNorm, to the variance)."""
    qk_norm: bool
    """Whether queries and keys are normalised per head, before the rotation."""
    activation: Activation
    """SwiGLU with three matrices, or GELU with two (exact, or with GPT-2's tanh approximation)."""
    bias: Bias
    """No biases, biases of the query, key and value projections, or of every matrix in a block and of LayerNorm."""
    dropout: float = Field(ge=0, lt=1)
    """Dropout probability of the embedding, the attention probabilities, and the outputs of attention and
    feed-forward."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(
                f"width {self.width} and heads {self.heads} give heads of {self.head_size}, and rotary positions "
                "need an even number; change one of them, or head_size"
            )
        if self.positions == "learned" and self.rope_scaling is not None:
            raise ValueError("rope_scaling needs rotary positions, found learned ones; leave one of them out")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one of them")
        return self

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(self.parameters_by_module().values())

    def parameters_by_module(self) -> dict[str, int]:
        """Number of parameters of each kind of module, in the order of a forward pass."""
        d, q, kv = self.width, self.heads * self.head_size, self.kv_heads * self.head_size
        qkv_bias = q + 2 * kv if self.bias != "none" else 0
        all_bias = self.bias == "all"
        gain = 2 if self.norm == "layer" and all_bias else 1  # gain and bias
        ups = 2 if self.activation == "swiglu" else 1  # gate and up
        return {
            "embedding": self.vocab * d,
            "positions": self.context * d if self.positions == "learned" else 0,
            "attention": self.depth * (2 * d * q + 2 * d * kv + qkv_bias + (d if all_bias else 0)),
            "feed-forward": self.depth * ((ups + 1) * d * self.ffn + (ups * self.ffn + d if all_bias else 0)),
            "norms": gain * (self.depth * (2 * d + (2 * self.head_size if self.qk_norm else 0)) + d),
            "head": 0 if self.tied else self.vocab * d,
        }


class Style(NamedTuple):
    """Architectural choices that a family sets, independent of the size. The defaults are Llama's."""

    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    window: int | None = None
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    activation: Activation = "swiglu"
    bias: Bias = "none"
    tied: bool = False


FAMILIES: dict[Family, Style] = {
    "llama": Style(),
    "gpt2": Style(positions="learned", norm="layer", activation="gelu-tanh", bias="all", tied=True),
    "mistral": Style(window=4096),
    "qwen2": Style(rope_theta=1e6, norm_eps=1e-6, bias="qkv"),
    "qwen3": Style(rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
}
"""As published: Touvron et al. 2023 (arXiv:2302.13971), Radford et al. 2019, Jiang et al. 2023 (2310.06825), Yang et
al. 2024 (2407.10671) and 2025 (2505.09388)."""


class ModelSettings(Settings):
    """The `model` table of a training stage: exactly one of `depth` and `size`, and optional overrides."""

    depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    """Number of blocks; every width follows from it."""
    size: str | None = None
    """Number of parameters, "4M" or "1.5B", embedding included; resolves to the depth with the closest count."""
    family: Family = "llama"
    """Defaults of the architectural settings below. Sizes do not depend on it, except the inner size with GELU."""
    width: PositiveInt | None = None
    """Features of the residual stream; default: 64 x depth."""
    heads: PositiveInt | None = None
    """Number of query heads; default: heads of 64 features, or smaller ones where that gives fewer than four."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); default: as many as heads."""
    head_size: PositiveInt | None = None
    """Features of one head; default: width / heads."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward; default: 4 x width, with SwiGLU 8/3 x width, rounded up to a multiple of 64 (256
    from width 1024 on)."""
    context: int = Field(default=256, ge=2)
    """Longest sequence in tokens."""
    tied: bool | None = None
    """Use the embedding matrix as the LM head: fewer parameters, slower learning at first; default: only for GPT-2."""
    positions: Positions | None = None
    """`rope` (rotary angles, no parameters) or `learned` (a table); default: the family's."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies; default: 10,000, for Qwen 1,000,000."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for a longer context, as in Llama 3.1."""
    window: PositiveInt | None = None
    """Number of tokens that a token attends to, itself included; default: all earlier ones, for Mistral 4,096."""
    norm: Norm | None = None
    """`rms` or `layer`; default: the family's."""
    norm_eps: PositiveFloat | None = None
    """Added to the mean square; default: 1e-5, for Qwen 1e-6."""
    qk_norm: bool | None = None
    """Normalise queries and keys per head; default: only for Qwen3."""
    activation: Activation | None = None
    """`swiglu`, `gelu` or `gelu-tanh` (GPT-2's approximation); default: the family's."""
    bias: Bias | None = None
    """`none`, `qkv` (queries, keys, values) or `all` (every matrix of a block, LayerNorm); default: the family's."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the embedding, the attention probabilities, and the outputs of attention and
    feed-forward."""

    @model_validator(mode="after")
    def _depth_or_size(self) -> Self:
        if (self.depth is None) == (self.size is None):
            given = "neither" if self.depth is None else f"depth = {self.depth} and size = '{self.size}'"
            raise ValueError(f"found {given}, expected exactly one of depth and size; write model = {{ depth = 4 }}")
        if self.size is not None:
            _parse_size(self.size)
        if self.depth is not None:
            self._at(self.depth, vocab=1)
        return self

    def resolve(self, vocab: int) -> ModelConfig:
        """The concrete shape for a vocabulary size.

        Raises:
            UserError: the numbers are inconsistent, or a single block already exceeds `size`.
        """
        try:
            return self._at(self.depth if self.depth is not None else self._nearest_depth(vocab), vocab)
        except ValidationError as error:
            raise UserError(problems(ModelConfig, error, "model")[0]) from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"model: {error}") from None

    def _at(self, depth: int, vocab: int) -> ModelConfig:
        width = self.width or WIDTH_PER_LAYER * depth
        heads = self.heads or _default_heads(width, self.head_size)
        if self.head_size is None and width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}; change one of them, or set head_size")
        style = {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in FAMILIES[self.family]._asdict().items()
        }
        return ModelConfig(
            vocab=vocab,
            depth=depth,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads or heads,
            head_size=self.head_size or width // heads,
            ffn=self.ffn or (_default_ffn(width) if style["activation"] == "swiglu" else 4 * width),
            context=self.context,
            rope_scaling=self.rope_scaling,
            dropout=self.dropout,
            **style,
        )

    def _nearest_depth(self, vocab: int) -> int:
        """The depth whose parameter count is closest to `size`. Counts grow with depth, so the search ends early."""
        assert self.size is not None
        target = _parse_size(self.size)
        best, distance = 0, float("inf")
        for depth in range(1, _MAX_SEARCH_DEPTH + 1):
            try:
                parameters = self._at(depth, vocab).parameters
            except ValueError:  # overridden heads do not divide this depth's width; another depth may fit
                continue
            if depth == 1 and parameters > 2 * target:
                raise UserError(
                    f"model.size: found '{self.size}', but one layer with a vocabulary of {vocab} has "
                    f"{parameters / 1e6:.2f}M parameters; take a larger size or a smaller vocabulary"
                )
            if abs(parameters - target) >= distance:
                break
            best, distance = depth, abs(parameters - target)
        return best or 1


def _parse_size(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"found size = '{text}', expected a count with a unit K, M or B; write size = \"4M\"")
    return float(match[1]) * _UNITS[match[2]]


def _default_heads(width: int, head_size: int | None) -> int:
    """Heads of 64 features as in GPT-2 and Llama, or smaller ones if the width would hold fewer than four."""
    if head_size is not None:
        return max(1, width // head_size)
    for size in _HEAD_SIZES:
        if width % size == 0 and width // size >= 4:
            return width // size
    for size in reversed(_HEAD_SIZES):
        if width % size == 0:
            return width // size
    raise ValueError(f"width {width} is not a multiple of {_HEAD_SIZES[-1]}; set heads, or a width that is")


def _default_ffn(width: int) -> int:
    """8/3 x width: three SwiGLU matrices have the parameters of two of 4 x width (Shazeer 2020, arXiv:2002.05202).

    Rounded up to a multiple of 64, from width 1024 on of 256 as in Llama, whose width 4,096 gives 11,008.
    """
    multiple = 64 if width < 1024 else 256
    return -(-8 * width // (3 * multiple)) * multiple


def segment_blocks(checkpointing: Checkpointing, depth: int) -> int:
    """Blocks of a segment; without checkpointing all of them are one."""
    match checkpointing:
        case "none":
            return depth
        case "full" | "selective":
            return 1
        case "sqrt":
            return max(1, round(math.sqrt(depth)))
        case blocks:
            return min(blocks, depth)
