"""Parameters, FLOPs and bytes of a training run, from the numbers of a model alone: no tensor is made, no torch loaded.

Units are decimal (1 GB = 10^9 bytes) as on data sheets. Every function says whose formula it is; what the sources print
and what the formula gives sometimes differ, and then the formula is right.

Letters: V vocabulary, d width, L layers, H heads, T context, b rows, N parameters.
"""

from dataclasses import asdict, dataclass
from typing import Protocol

FORWARD_FLOPS = 2
"""Per parameter and token: one multiplication, one addition."""


class Shape(Protocol):
    """The numbers of a model that its cost depends on."""

    @property
    def vocab(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tied(self) -> bool: ...


@dataclass(frozen=True)
class Parameters:
    """Trainable numbers by part."""

    embedding: int
    attention: int
    """Queries, keys, values and output of all layers."""
    ffn: int
    """The three matrices of SwiGLU of all layers."""
    norms: int
    head: int
    """0 where the head is the embedding."""

    @property
    def total(self) -> int:
        """All of them, a tied head once."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Memory:
    """Bytes of a training state, before any sharding."""

    weights: int
    gradients: int
    moments: int
    """Adam's two, in fp32."""
    master: int
    """fp32 copy of the weights; 0 where they are fp32 already."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def parameters(shape: Shape) -> Parameters:
    """Count the parameters of a decoder without biases: RMSNorm, grouped-query attention, SwiGLU."""
    d, kv = shape.width, shape.width // shape.heads * shape.kv_heads
    return Parameters(
        embedding=shape.vocab * d,
        attention=shape.depth * (2 * d * d + 2 * d * kv),
        ffn=shape.depth * 3 * d * shape.ffn,
        norms=(2 * shape.depth + 1) * d,
        head=0 if shape.tied else shape.vocab * d,
    )


def forward_flops(parameters: int, tokens: int) -> int:
    """2 N per token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), attention scores left out."""
    return FORWARD_FLOPS * parameters * tokens


def training_flops(parameters: int, tokens: int) -> int:
    """6 N per token: the backward pass costs twice the forward (gradients of inputs and of weights)."""
    return 3 * forward_flops(parameters, tokens)


def training_flops_per_token(shape: Shape) -> int:
    """6 N + 12 L d T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): what utilisation is measured with.

    N counts what a token is multiplied with: the head, tied or not, and not the embedding, which is looked up. The
    second term is attention over the full T x T, as is customary, although a causal kernel computes half.
    """
    part = parameters(shape)
    multiplied = part.attention + part.ffn + part.norms + shape.vocab * shape.width
    return 6 * multiplied + 12 * shape.depth * shape.width * shape.context


def state_bytes(parameters: int, weight_bytes: int = 4) -> Memory:
    """Weights, gradients of the same width, Adam's moments, and a master copy where the weights are not fp32."""
    return Memory(
        weights=parameters * weight_bytes,
        gradients=parameters * weight_bytes,
        moments=parameters * 8,
        master=0 if weight_bytes == 4 else parameters * 4,
    )


def activation_bytes(depth: int, width: int, heads: int, context: int, rows: int = 1, fused: bool = True) -> int:
    """L b T d (34 + 5 H T / d) bytes in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, equation 2).

    The second term is the T x T scores, their softmax and dropout; fused attention never stores them. Derived for a
    GELU block with 4 d: SwiGLU at 8/3 d is close to it.
    """
    linear = 34 * depth * rows * context * width
    return linear if fused else linear + 5 * depth * rows * heads * context * context


def score_elements(heads: int, context: int, rows: int = 1) -> int:
    """Elements of one layer's attention scores when written out, b H T^2: four times as many for twice the context."""
    return rows * heads * context * context
