"""The shapes that are measured: one Llama-type decoder each, the same for us and for every peer.

S1 to S4 are sizes for a CPU, G1 and G2 for a GPU; A1 is for post-training with short answers, `tiny` for trying a
command out. They have RMSNorm, SwiGLU, rotary positions, no biases, no dropout and the embedding as head, because most
peers can build exactly that, so that parameters, FLOPs and losses can be compared and not only tokens per second. S4
and G1 have GPT-2's 124M numbers (depth, width, heads, vocabulary) in that style. GPT2 is that model itself, for peers
that know nothing else: LayerNorm, GELU, learned positions, biases, and the vocabulary filled up to a multiple of 64 as
nanoGPT does. Rejected: each tool's own default model, which would measure the models.
"""

from dataclasses import dataclass

from ingot.core.errors import UserError, nearest
from ingot.model.config import Family, ModelConfig, ModelSettings


@dataclass(frozen=True)
class Shape:
    """A model and the batch that it is trained on."""

    name: str
    vocab: int
    depth: int
    width: int
    heads: int
    context: int
    rows: int
    """Rows of a step."""
    device: str = "cpu"
    """Where it is meant to be measured; the others can be measured anywhere."""
    checked: int = 6
    """Steps before the clock starts: they warm up, and their losses are compared."""
    family: Family = "llama"
    """Whose blocks it has; GPT-2's with the exact GELU, which every peer has."""

    def config(self, context: int | None = None) -> ModelConfig:
        """The model, with this context or its own."""
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
        """Of a step."""
        return self.rows * self.context

    @property
    def memory(self) -> float:
        """Bytes that a process takes which trains it, about: what is imported, weights with gradients, moments and a
        copy, and what a block keeps of a token (a peer's peaks at S1, S3 and S4: 0.7, 1.7 to 2.0 and 3.7 GB)."""
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
"""By the name that `--shape` takes."""


def named(name: str) -> Shape:
    """The shape of that name.

    Raises:
        UserError: there is none.
    """
    if name not in SHAPES:
        raise UserError(f"--shape: found '{name}', expected one of the known shapes; {nearest(name, SHAPES)}")
    return SHAPES[name]
