"""Which models the CPU backend supports, and the memory of its activations, for `ingot plan`. No torch."""

import os
import shutil
from pathlib import Path

from ingot.kernels import LANES
from ingot.plan.memory import FP32, Activations
from ingot.plan.shape import Shape

_INSTRUCTIONS = {"fp32": "avx2", "bf16": "avx512_bf16"}
_ELEMENT = {"fp32": 4, "bf16": 2}


def cpu_activations(shape: Shape, rows: int, precision: str, max_logits: int) -> Activations | None:
    """Activations of a micro-batch; None if the kernels do not train this model on this machine.

    Attention scores and copies of weights are not stored. Rotary angles, which all blocks share, are not counted.

    Args:
        rows: of a micro-batch.
        max_logits: elements of a chunk's logits.
    """
    if precision not in _ELEMENT or shape.dropout or not has_kernel(shape) or not _has_instructions(precision):
        return None
    tokens, d, element = rows * shape.context, shape.width, _ELEMENT[precision]
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    stream = 2 * d * FP32  # before attention and before the feed-forward
    inputs = 2 * d + 2 * (queries + keys) + 2 * shape.ffn  # norms; queries, keys, values, output; gate and up
    layer = stream + inputs * element + shape.heads * FP32
    return Activations(
        layers=tokens * (shape.depth * layer + d * FP32 + d * element),
        scores=0,
        casts=0,
        logits=element * -(-shape.vocab // LANES) * LANES * min(tokens, max(1, max_logits // shape.vocab)),
    )


def has_kernel(shape: Shape) -> bool:
    """Whether the kernels support blocks of this shape."""
    return (
        (shape.norm, shape.activation, shape.bias) == ("rms", "swiglu", "none")
        and not shape.qk_norm
        and shape.head_size <= 256
        and all(width % LANES == 0 for width in (shape.width, shape.head_size, shape.ffn))
    )


def _has_instructions(precision: str) -> bool:
    compiler = shutil.which((os.environ.get("CXX") or "g++").split()[0])
    flags = Path("/proc/cpuinfo")
    return bool(compiler) and flags.exists() and _INSTRUCTIONS[precision] in flags.read_text().split()
