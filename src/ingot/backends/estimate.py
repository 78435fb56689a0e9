"""Which models the CPU backend supports, and the memory of its activations, for `ingot plan`. No torch."""

import os
import shutil
from pathlib import Path

from ingot.kernels import LANES
from ingot.plan.memory import FP32, Activations
from ingot.plan.shape import Shape

_INSTRUCTIONS = {"fp32": "avx2", "bf16": "avx512_bf16"}
"""Precision -> the instructions that its kernels need, as in /proc/cpuinfo."""
_ELEMENT = {"fp32": 4, "bf16": 2}
_MAX_HEAD = 256
"""Features of a head."""


def cpu_activations(shape: Shape, rows: int, precision: str, max_logits: int, segment: int = 0) -> Activations | None:
    """Activations of a micro-batch; None if the kernels do not train this model on this machine (`why_not`).

    Attention scores and copies of weights are not stored. Rotary angles, which all blocks share, are not counted.

    Args:
        rows: of a micro-batch.
        max_logits: elements of a chunk's logits.
        segment: blocks of a segment that stores its input only; 0: all activations are stored.
    """
    if why_not(shape, precision):
        return None
    tokens, d, element = rows * shape.context, shape.width, _ELEMENT[precision]
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    stream = 2 * d * FP32  # before attention and before the feed-forward
    inputs = 2 * d + 2 * (queries + keys) + 2 * shape.ffn  # norms; queries, keys, values, output; gate and up
    layer = stream + inputs * element + shape.heads * FP32
    last, inputs = tokens * (d * FP32 + d * element), tokens * d * FP32
    logits = element * -(-shape.vocab // LANES) * LANES * min(tokens, max(1, max_logits // shape.vocab))
    if not segment:
        return Activations(layers=tokens * shape.depth * layer + last, scores=0, casts=0, logits=logits)
    stream = 2 * inputs + (tokens * d * element if element < FP32 else 0)  # its gradient, before and after a block
    parts, segments = shape.parameters_by_module(), -(-shape.depth // segment)
    block = (parts["attention"] + parts["feed-forward"]) * FP32 // shape.depth
    # One node hands out the gradients of all blocks at its end, so the segment that comes last is beside those of the
    # others, but beside no other inputs.
    gradients = max(block, block * (shape.depth - segment + 1) - (segments - 1) * inputs)
    recomputed = tokens * segment * layer + stream + gradients - last  # the final norm's are freed
    return Activations(
        layers=segments * inputs + last, scores=0, casts=0, logits=logits, recomputed=max(0, recomputed - logits)
    )


def why_not(shape: Shape, precision: str, adapter: bool = False, taps: bool = False) -> str | None:
    """Why the backend `cpu` does not train a model on this machine; None if it does.

    Args:
        adapter: whether an adapter is trained, and the model's own weights are frozen.
        taps: whether the loss reads tensors inside the model.
    """
    if taps:
        return "only PyTorch hands out the states of layers that features and relations read"
    if adapter:
        return "the C++ kernels do not train adapters"
    if shape.dropout:
        return "the C++ kernels have no dropout"
    if not has_kernel(shape):
        sizes = f"widths in steps of {LANES} and heads of at most {_MAX_HEAD}"
        return f"the C++ kernels train RMSNorm and SwiGLU without biases and qk_norm, {sizes}"
    if precision not in _ELEMENT:
        return f"the C++ kernels do not compute in {precision}"
    if not _has_instructions(precision):
        return f"the C++ kernels need a C++ compiler and a CPU with {_INSTRUCTIONS[precision]}"
    return None


def has_kernel(shape: Shape) -> bool:
    """Whether the kernels support blocks of this shape."""
    return (
        (shape.norm, shape.activation, shape.bias) == ("rms", "swiglu", "none")
        and not shape.qk_norm
        and shape.head_size <= _MAX_HEAD
        and all(width % LANES == 0 for width in (shape.width, shape.head_size, shape.ffn))
    )


def _has_instructions(precision: str) -> bool:
    compiler = shutil.which((os.environ.get("CXX") or "g++").split()[0])
    flags = Path("/proc/cpuinfo")
    return bool(compiler) and flags.exists() and _INSTRUCTIONS[precision] in flags.read_text().split()
