"""The shape of a model: one dial (depth, or a parameter count) in the recipe, concrete numbers in a checkpoint.

`ModelSettings` is what a user writes; every width follows from the depth and can be overridden. `ModelConfig` is what
`resolve` makes of it once the vocabulary is known: every field required, so that a checkpoint never depends on the
defaults of the version that reads it. Free of torch, because `ingot plan` prints shapes without loading it.

Rejected: a table of named sizes (one more place to look, and every size in it is somebody else's) and a separate
setting for the size of a head (it is width / heads; two settings could then disagree).
"""

import re
from typing import Self

from pydantic import PositiveFloat, PositiveInt, ValidationError, model_validator

from ingot.core.errors import UserError
from ingot.core.recipe import Settings

WIDTH_PER_LAYER = 64
_HEAD_SIZES = (64, 32, 16, 8)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
_MAX_DEPTH = 256


class ModelConfig(Settings):
    """A model's shape with nothing left to derive; saved in checkpoints."""

    vocab: PositiveInt
    """Number of ids the model can read and predict."""
    depth: PositiveInt
    """Number of blocks."""
    width: PositiveInt
    """Size of the residual stream."""
    heads: PositiveInt
    """Query heads; each has width / heads features."""
    kv_heads: PositiveInt
    """Key and value heads, each shared by heads / kv_heads query heads."""
    ffn: PositiveInt
    """Inner size of the SwiGLU feed-forward."""
    context: PositiveInt
    """Longest sequence in tokens."""
    tied: bool
    """Whether the output head is the embedding matrix."""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat
    """Added to the mean square in RMSNorm."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}; change one of them")
        if self.head_size % 2:
            raise ValueError(
                f"width {self.width} over heads {self.heads} gives heads of {self.head_size}, and rotary positions "
                "need an even number; change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one of them")
        return self

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Number of trainable numbers, a tied head counted once."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_size
        block = attention + 3 * self.width * self.ffn + 2 * self.width
        return self.vocab * self.width * (1 if self.tied else 2) + self.depth * block + self.width


class ModelSettings(Settings):
    """The recipe's table `model = { depth = 4 }` or `model = { size = "4M" }`."""

    depth: PositiveInt | None = None
    """The dial: number of blocks. Width, heads and feed-forward follow from it."""
    size: str | None = None
    """Instead of depth: a parameter count such as "4M"; the depth that comes closest for the vocabulary is taken."""
    width: PositiveInt | None = None
    """Size of the residual stream; default 64 x depth."""
    heads: PositiveInt | None = None
    """Query heads; default: heads of 64 features, or smaller ones where that would leave fewer than four."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); default: as many as heads."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward; default 8/3 x width, rounded up to a multiple of 64 (256 from width 1024 on)."""
    context: PositiveInt = 256
    """Longest sequence in tokens."""
    tied: bool = False
    """Use the embedding matrix as the output head: fewer parameters, but a slower start at the same cost."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""

    @model_validator(mode="after")
    def _one_dial(self) -> Self:
        if (self.depth is None) == (self.size is None):
            found = "neither" if self.depth is None else f"depth = {self.depth} and size = '{self.size}'"
            raise ValueError(f"found {found}, expected exactly one of depth and size; write model = {{ depth = 4 }}")
        if self.size is not None:
            _parse_size(self.size)
        if self.depth is not None:
            self._at(self.depth, vocab=1)
        return self

    def resolve(self, vocab: int) -> ModelConfig:
        """The concrete shape for a vocabulary.

        Raises:
            UserError: the numbers do not fit together, or no depth comes near `size`.
        """
        try:
            return self._at(self.depth if self.depth is not None else self._nearest_depth(vocab), vocab)
        except ValidationError as error:
            raise UserError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"model: {error}") from None

    def _at(self, depth: int, vocab: int) -> ModelConfig:
        width = self.width or WIDTH_PER_LAYER * depth
        heads = self.heads or _default_heads(width)
        return ModelConfig(
            vocab=vocab,
            depth=depth,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads or heads,
            ffn=self.ffn or _default_ffn(width),
            context=self.context,
            tied=self.tied,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
        )

    def _nearest_depth(self, vocab: int) -> int:
        """The depth whose parameter count is closest to `size`; counts grow with depth, so the first rise ends it."""
        assert self.size is not None
        target = _parse_size(self.size)
        best, distance = 0, float("inf")
        for depth in range(1, _MAX_DEPTH + 1):
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


def _default_heads(width: int) -> int:
    """Heads of 64 features as in GPT-2 and Llama, but at least four where the width allows: few heads learn worse."""
    for size in _HEAD_SIZES:
        if width % size == 0 and width // size >= 4:
            return width // size
    for size in reversed(_HEAD_SIZES):
        if width % size == 0:
            return width // size
    raise ValueError(f"width {width} is not a multiple of {_HEAD_SIZES[-1]}; set heads, or a width that is")


def _default_ffn(width: int) -> int:
    """8/3 x width gives SwiGLU's three matrices the parameters of a 4 x width pair (Shazeer 2020, arXiv:2002.05202).

    From width 1024 on the multiple is 256, Llama's: 11,008 at 4,096, where multiples of 64 would start at 10,944.
    """
    multiple = 64 if width < 1024 else 256
    return -(-8 * width // (3 * multiple)) * multiple
