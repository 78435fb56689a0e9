"""Bytes of a training run by what they hold, from counts alone: no tensor is made, no torch loaded.

Units are decimal (1 GB = 10^9 bytes) as on data sheets. Two counts of activations stand side by side: the paper's, for
a block of GPT-3 in 16 bits, which is what published figures use; and our own engine's, which a test holds against what
autograd keeps.

Letters: V vocabulary, d width, L layers, H heads, T context, b rows, N parameters, f inner size of the feed-forward.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from ingot.plan.shape import Shape

FP32 = 4
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of a training state, before any sharding."""

    weights: int
    gradients: int
    moments: int
    """What the optimizer keeps a parameter."""
    master: int
    """fp32 copy of the weights; 0 where they are fp32 already."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def state_bytes(
    parameters: int, weight_bytes: int = FP32, moments: float = ADAM_MOMENTS, moment_bytes: int = FP32
) -> Memory:
    """Weights, gradients of the same width, the optimizer's moments, and a master copy where weights are not fp32.

    Args:
        parameters: N.
        weight_bytes: 4 for fp32, 2 for bf16 and fp16.
        moments: numbers kept a parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        moment_bytes: 4 for fp32, 2 for bf16.
    """
    return Memory(
        weights=parameters * weight_bytes,
        gradients=parameters * weight_bytes,
        moments=round(parameters * moments * moment_bytes),
        master=0 if weight_bytes >= FP32 else parameters * FP32,
    )


def activation_bytes(depth: int, width: int, heads: int, context: int, rows: int = 1, fused: bool = True) -> int:
    """L b T d (34 + 5 H T / d) bytes in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, equation 2).

    The second term is the T x T scores, their softmax and dropout; fused attention never stores them. Derived for a
    GELU block with 4 d and dropout.
    """
    linear = 34 * depth * rows * context * width
    return linear if fused else linear + 5 * depth * rows * score_elements(heads, context)


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass of our engine keeps for its backward pass."""

    layers: int
    """Inputs of norms, matrices, attention and activation functions."""
    scores: int
    """Attention probabilities where they are written out, else the masks that the fused kernel is given."""
    casts: int
    """Copies of the matrices in the precision of the forward pass, where the parameters have a higher one."""
    logits: int
    """One chunk of logits, with its softmax and its gradient."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def engine_activations(
    shape: Shape,
    rows: int,
    element: int,
    plain: bool,
    max_logits: int,
    masks: int = 0,
    stream: int = FP32,
    copied: bool = False,
) -> Activations:
    """What one micro-batch keeps, by the layout of our blocks.

    Args:
        shape: the model.
        rows: rows of a micro-batch.
        element: bytes of a number in the forward pass.
        plain: whether attention scores are written out.
        max_logits: elements of logits held at once (objectives that need more of them than the labels'
            log-probabilities hold gradients and wider copies, too).
        masks: distinct T x T masks: none for plainly causal rows, one for a window, one a row for isolated documents.
            The fused kernel keeps them anew in every layer.
        stream: bytes of a number of the residual stream, where that is more than `element`.
        copied: matrices are frozen, so that what they read is not kept, but for the copies that corrections read
            (`adapter_activations` counts those). Corrections without dropout read, and keep, what the matrices do.
    """
    tokens, d = rows * shape.context, shape.width
    stream, gated = max(element, stream), shape.activation == "swiglu"
    copies = 2 if shape.norm == "rms" else 1  # RMSNorm also keeps the normalised input
    norm = copies * d * stream
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    attention = 2 * heads * element + (copies * heads * stream if shape.qk_norm else 0)  # queries, keys, values, output
    ffn = (3 if gated else 1) * shape.ffn * element
    reads = 0 if copied else (2 * d + shape.ffn) * element  # of queries' projection, of the first matrix and the last
    dropped = 2 * d if shape.dropout else 0  # a byte for each coin
    layer = 2 * norm + attention + ffn + reads + dropped
    squares = score_elements(shape.heads, shape.context, rows) if plain else 0
    coins = squares if shape.dropout else 0
    squares = squares + coins or score_elements(1, shape.context, masks)
    parts = shape.parameters_by_part()
    matrices = parts["attention"] + parts["feed-forward"]
    return Activations(
        layers=tokens * (shape.depth * layer + norm + d * element),
        scores=shape.depth * (squares * element + coins),
        casts=matrices * element if element < FP32 else 0,
        logits=element * min(tokens * shape.vocab, max(max_logits, shape.vocab)),
    )


def adapter_activations(
    sizes: Collection[tuple[int, int]], rank: int, tokens: int, element: int, dora: bool = False, dropout: bool = False
) -> int:
    """Bytes that corrections of low rank keep beside what their layers read: A x, and what their own parts multiply.

    Args:
        sizes: inputs and outputs of each adapted matrix.
        tokens: of a micro-batch.
        element: bytes of a number in the forward pass.
        dora: rows are scaled by learned lengths, so both products are kept.
        dropout: the correction reads a copy of the input, with a byte for each coin.
    """
    layers = (rank + (2 * o if dora else 0) + (i if dropout else 0) for i, o in sizes)
    return tokens * (element * sum(layers) + (sum(i for i, _ in sizes) if dropout else 0))


def score_elements(heads: int, context: int, rows: int = 1) -> int:
    """Elements of one layer's attention scores when written out, b H T^2: four times as many for twice the context."""
    return rows * heads * context * context


def cache_bytes(layers: int, kv_width: int, context: int, rows: int = 1, element_bytes: int = 2) -> int:
    """Keys and values of all layers while generating: 2 L T d_kv a row."""
    return 2 * layers * rows * context * kv_width * element_bytes
