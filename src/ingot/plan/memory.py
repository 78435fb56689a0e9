"""Memory of a training run in bytes, computed from the shape. No torch.

Units are decimal (1 GB = 10^9 bytes) as on data sheets. There are two counts of activations: the published one for a
GPT-3 block in 16 bits (`activation_bytes`), and that of ingot's blocks (`engine_activations`), which tests compare with
what autograd saves.

Symbols: V vocabulary, d width, L layers, H heads, T context, b rows, N parameters, f inner size of the feed-forward.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from ingot.plan.shape import Shape

FP32 = 4
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of the training state on one device, without sharding."""

    weights: int
    gradients: int
    moments: int
    """State of the optimizer."""
    master: int
    """fp32 copy of the weights; 0 if they are fp32."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def state_bytes(
    parameters: int, weight_bytes: int = FP32, moments: float = ADAM_MOMENTS, moment_bytes: int = FP32
) -> Memory:
    """Bytes of weights, gradients in the same dtype, optimizer state, and an fp32 copy of weights in lower precision.

    Args:
        parameters: N.
        weight_bytes: 4 for fp32, 2 for bf16 and fp16.
        moments: optimizer state per parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        moment_bytes: 4 for fp32, 2 for bf16.
    """
    return Memory(
        weights=parameters * weight_bytes,
        gradients=parameters * weight_bytes,
        moments=round(parameters * moments * moment_bytes),
        master=0 if weight_bytes >= FP32 else parameters * FP32,
    )


def activation_bytes(depth: int, width: int, heads: int, context: int, rows: int = 1) -> tuple[int, int]:
    """34 L b T d and 5 L b H T^2 bytes in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, equation 2).

    The second number is the T x T scores, their softmax and dropout, which fused attention does not store. Valid for
    GELU blocks of inner size 4 d with dropout.
    """
    return 34 * depth * rows * context * width, 5 * depth * rows * score_elements(heads, context)


_SOFTMAX_COPIES = 2
"""In fp32, of a chunk of logits: logarithms of probabilities, and the probabilities of the chunk before. Logits of a
lower precision are converted, which is one more."""

_PENALTY_COPIES = 4
"""The same with label smoothing or a z-loss, whose gradient torch derives; and one in a lower precision."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass saves for the backward pass."""

    layers: int
    """Inputs of norms, matrices, attention and activation functions."""
    scores: int
    """Attention probabilities of eager attention, or the mask tensors of fused attention."""
    casts: int
    """Copies of the weights in the precision of the forward pass, if it is lower than the parameters'."""
    logits: int
    """A chunk of logits, which also holds its softmax and gradient, and what the LM head needs beside it
    (`head_bytes`)."""
    recomputed: int = 0
    """Activations of a segment that the backward pass computes again (`checkpointed`), and their gradients, beyond
    `logits`, which are freed by then."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def engine_activations(
    shape: Shape,
    rows: int,
    element: int,
    eager: bool,
    max_logits: int,
    masks: int = 0,
    stream: int = FP32,
    frozen: bool = False,
    dropout_element: int = 1,
    gains: bool = True,
) -> Activations:
    """Activations of a micro-batch.

    Args:
        shape: the model.
        rows: rows of the micro-batch.
        element: bytes per element in the forward pass.
        eager: whether attention is eager, which stores the probabilities.
        max_logits: elements of a chunk's logits. (Objectives that need more than the labels' log-probabilities store
            further copies, which are not counted.)
        masks: number of distinct T x T masks: 0 for causal rows, 1 for a window, one per row for isolated documents.
            The fused kernel saves them in every layer.
        stream: bytes per element of the residual stream, if more than `element`.
        frozen: whether weights are frozen and their adapters have dropout. Inputs of the weights are then not saved;
            `adapter_activations` counts the adapters' inputs. (Adapters without dropout save the same inputs.)
        dropout_element: bytes per element of a dropout mask: 1 on a GPU; `element` on a CPU, where it is a factor.
        gains: whether the gains of norms are trained, for which RMSNorm also keeps the normalised input.
    """
    tokens, d = rows * shape.context, shape.width
    stream, gated = max(element, stream), shape.activation == "swiglu"
    copies = 2 if shape.norm == "rms" and gains else 1
    norm = copies * d * stream
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    attention = 2 * heads * element + (copies * heads * stream if shape.qk_norm else 0)  # queries, keys, values, output
    ffn = (3 if gated else 1) * shape.ffn * element
    inputs = 0 if frozen else (2 * d + shape.ffn) * element  # of the q, k, v projections, of gate and up, of down
    dropped = 2 * d * dropout_element if shape.dropout else 0
    layer = 2 * norm + attention + ffn + inputs + dropped
    squares = score_elements(shape.heads, shape.context, rows) if eager else 0
    dropped_squares = squares if shape.dropout else 0
    squares = squares + dropped_squares or score_elements(1, shape.context, masks)
    parameters = shape.parameters_by_module()
    matrices = parameters["attention"] + parameters["feed-forward"]
    return Activations(
        layers=tokens * (shape.depth * layer + norm + d * element),
        scores=shape.depth * (squares * element + dropped_squares * dropout_element),
        casts=matrices * element if element < FP32 else 0,
        logits=element * min(tokens * shape.vocab, max(max_logits, shape.vocab)),
    )


def checkpointed(
    stored: Activations,
    shape: Shape,
    rows: int,
    element: int,
    eager: bool,
    segment: int,
    selective: bool = False,
    masks: int = 0,
    stream: int = FP32,
) -> Activations:
    """Activations of a micro-batch with activation checkpointing (`model/checkpointing.py`).

    The backward pass has most of them when it begins with a segment, or in its eager attention, where the
    feed-forward's are freed and gradients of the scores are added.

    Args:
        stored: those without checkpointing; the others as in `engine_activations`.
        segment: blocks of a segment, which stores its input.
        selective: whether a segment also stores the results of matrix products and of fused attention.
    """
    L, d, f, tokens = shape.depth, shape.width, shape.ffn, rows * shape.context
    stream, norm = max(element, stream), (2 if shape.norm == "rms" else 1) * shape.width * max(element, stream)
    gates, last = 2 if shape.activation == "swiglu" else 1, tokens * (norm + d * element)
    block, scores = (stored.layers - last) // L, stored.scores // L
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    products = again = 0
    if selective:
        result = 0 if eager else queries  # of attention
        again = tokens * element * (gates * f + keys + result)
        products = again + tokens * (element * (queries + keys + 2 * d) + (0 if eager else shape.heads * FP32))
    gradients = tokens * (element * gates * f + 2 * d * stream)
    if eager:
        feedforward = tokens * (element * (2 * gates * f + d) + norm)
        squares = score_elements(shape.heads, shape.context, rows) * element
        in_attention = (1 if shape.dropout else 2) * squares + tokens * 2 * d * stream - feedforward
        gradients = max(gradients, in_attention)
    recomputed = segment * (block + scores + stored.casts // L) - again + gradients
    mask = (
        score_elements(1, shape.context, max(1, masks)) * element if eager else score_elements(1, shape.context, masks)
    )
    inputs = tokens * d * stream
    return Activations(
        layers=-(-L // segment) * inputs + L * products + last,
        scores=mask,
        casts=0,
        logits=stored.logits,
        recomputed=max(
            0, recomputed - inputs - last - stored.logits
        ),  # the input is stored, the final norm's are freed
    )


def adapter_activations(
    sizes: Collection[tuple[int, int]],
    rank: int,
    tokens: int,
    element: int,
    dora: bool = False,
    dropout: bool = False,
    dropout_element: int = 1,
) -> int:
    """Bytes that adapters save in addition to the inputs of their layers: A x, and the operands of DoRA and dropout.

    Args:
        sizes: inputs and outputs of each adapted matrix.
        tokens: of a micro-batch.
        element: bytes per element in the forward pass.
        dora: whether rows are scaled by a learned norm, which saves both products.
        dropout: whether adapters read a copy of the input with dropout, which saves the copy and a mask.
        dropout_element: bytes per element of that mask, as in `engine_activations`.
    """
    layers = (rank + (2 * o if dora else 0) + (i if dropout else 0) for i, o in sizes)
    return tokens * (element * sum(layers) + (dropout_element * sum(i for i, _ in sizes) if dropout else 0))


def gradients_at_peak(gradients: int, head: int, activations: int) -> int:
    """Bytes of gradients beside the activations at the peak of a step.

    A backward pass begins with all activations and the first gradients, and ends with all gradients and no activations:
    the peak is the larger of the two.

    Args:
        gradients: bytes of all of them, at the end.
        head: of the LM head's, and those of earlier micro-batches.
        activations: bytes that the forward pass saves.
    """
    return max(head, gradients - activations)


def head_bytes(
    shape: Shape,
    rows: int,
    element: int,
    softmax_chunk: int,
    kernels: bool = False,
    trained: bool = True,
    accumulated: bool = False,
    plain: bool = True,
) -> int:
    """Bytes that the LM head needs beside a chunk of logits (`model/lm_head.py`): its weight in the precision of the
    forward pass, and the softmax's fp32 copies or later the gradients that it makes, whichever is more.

    Args:
        shape, rows, element: as for `engine_activations`.
        softmax_chunk: elements of the logits whose softmax is computed at a time.
        kernels: whether C++ kernels need neither copies of the weight nor of logits.
        trained: whether the weight has a gradient.
        accumulated: whether a gradient of an earlier micro-batch is there, to which the new one is added. (A first one
            is counted by `gradients_at_peak`.)
        plain: whether the loss has neither label smoothing nor a z-loss, for which there are no kernels.
    """
    tokens, weight = rows * shape.context, shape.vocab * shape.width
    kernels = kernels and plain
    copied = 0 if kernels or element >= FP32 else element
    copies = (0 if kernels else _SOFTMAX_COPIES + (element < FP32)) if plain else _PENALTY_COPIES
    before = (copies * FP32 + (0 if plain else copied)) * min(softmax_chunk, tokens * shape.vocab)
    after = tokens * shape.width * (FP32 + element + copied)  # of hidden states: gradient, scaled, product
    if trained:
        after += weight * copied
        after, before = (after + weight * FP32, before) if accumulated else (after, before - weight * FP32)
    return weight * copied + max(before, after)


def tied_gradients(accumulated: bool, in_place: bool) -> int:
    """Gradients of a tied table beside the one that is kept, at the end of a backward pass.

    Args:
        accumulated: whether one of earlier micro-batches is there.
        in_place: whether the embedding's is added to the head's in place. It is not with torch in fp32, where the
            head's is the matrix product itself.
    """
    return 1 + accumulated + (not in_place)


def block_gradients(shape: Shape, rows: int, element: int, stream: int = FP32) -> int:
    """Bytes of the gradients inside the block that a backward pass is in: of the feed-forward's inner features, and of
    the residual stream before and after it. A chunk of logits is freed by then.

    Args:
        shape, rows, element, stream: as for `engine_activations`.
    """
    gates = 2 if shape.activation == "swiglu" else 1
    return rows * shape.context * (gates * shape.ffn * element + 2 * shape.width * max(element, stream))


def score_elements(heads: int, context: int, rows: int = 1) -> int:
    """Elements of the attention scores of one layer in eager attention, b H T^2."""
    return rows * heads * context * context


def cache_bytes(layers: int, kv_width: int, context: int, rows: int = 1, element_bytes: int = 2) -> int:
    """Bytes of the KV cache: 2 L T d_kv elements per row."""
    return 2 * layers * rows * context * kv_width * element_bytes
