"""The measured shapes: decoders that are equal for ingot and all peers.

S1 to S4 are sizes for a CPU, G1 and G2 for a GPU; A1 is for post-training with short answers, `tiny` for trying a
command out. They have RMSNorm, SwiGLU, rotary positions, no biases, no dropout and a tied head. Most peers can build
exactly that, so parameters, FLOPs and losses can be compared too. S4 and G1 have the depth, width, heads and vocabulary
of GPT-2 124M in that style. GPT2 is that model itself, for peers that have only its blocks: LayerNorm, GELU, learned
positions, biases, and the vocabulary padded to a multiple of 64 as in nanoGPT.
"""

from dataclasses import dataclass

from ingot.core.errors import UserError, nearest
from ingot.model.config import Family, ModelConfig, ModelSettings


@dataclass(frozen=True)
class Shape:
    """A model and its training batch."""

    name: str
    vocab: int
    depth: int
    width: int
    heads: int
    context: int
    rows: int
    """Rows per step."""
    device: str = "cpu"
    """The device that the size is meant for; any device can be measured."""
    checked: int = 6
    """Steps before the timed window: they warm up, and their losses are compared."""
    family: Family = "llama"
    """The family of its blocks; GPT-2's use the exact GELU, which every peer has."""

    def config(self, context: int | None = None) -> ModelConfig:
        """The model's config; `context` replaces the shape's own."""
        context = context or self.context
        settings = ModelSettings(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            context=context,
            tied=True,
            family=self.family,
            activation="gelu" if self.family == "gpt2" else None,
        )
        return settings.resolve(self.vocab)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows * self.context

    @property
    def memory(self) -> float:
        """Approximate bytes of a training process: imports; weights, gradients, moments and a copy of the weights;
        activations. Measured peaks of peers at S1, S3 and S4: 0.7, 1.7 to 2.0 and 3.7 GB."""
        return 0.4e9 + 20 * self.config().parameters + 136 * self.tokens * self.depth * self.width


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S1", 65, 4, 128, 4, 64, 64),
        Shape("S2", 65, 4, 128, 4, 64, 12),
        Shape("S3", 65, 6, 384, 6, 256, 16, checked=3),
        Shape("S4", 50_257, 12, 768, 12, 256, 4, checked=3),
        Shape("GPT2", 50_304, 12, 768, 12, 1024, 16, device="cuda", family="gpt2"),
        Shape("G1", 50_257, 12, 768, 12, 1024, 16, device="cuda"),
        Shape("G2", 50_257, 20, 2048, 16, 1024, 8, device="cuda"),
        Shape("A1", 1000, 4, 128, 4, 48, 64, checked=4),
        Shape("tiny", 61, 2, 32, 2, 16, 4, checked=4),
        Shape("tiny-gpt2", 61, 2, 32, 2, 16, 4, checked=4, family="gpt2"),
    )
}
"""Shapes by the name that `--shape` takes."""


def named(name: str) -> Shape:
    """The shape of that name.

    Raises:
        UserError: there is no such shape.
    """
    if name not in SHAPES:
        raise UserError(f"--shape: found '{name}', expected one of the known shapes; {nearest(name, SHAPES)}")
    return SHAPES[name]
