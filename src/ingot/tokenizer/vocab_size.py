"""The size of a vocabulary: a larger one makes texts shorter and the embedding larger.

    embedding bytes = V x d x bytes a number               50,000 x 4,096 x 4 = 819,200,000

The arithmetic needs nothing; what texts gain is measured, and a BPE gives it for every smaller vocabulary at once: its
first merges are the smaller vocabulary.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_tokenizers import LibraryTokenizer
from ingot.tokenizer.settings import BYTES, SPECIALS

PRESETS = (32_000, 50_257, 100_000, 128_000)
"""Vocabularies in use: LLaMA's, GPT-2's, and the size of later ones."""
FULL = (4096, 32)
"""Width and layers of a model of 7B parameters."""


@dataclass(frozen=True)
class Cost:
    """What a vocabulary costs a model."""

    vocab: int
    parameters: int
    """Of one table of `vocab` x width."""
    bytes: int
    share: float
    """Of all parameters of the model: its blocks (12 layers x width^2) and its tables."""


def cost(vocab: int, width: int = FULL[0], layers: int = FULL[1], number_bytes: int = 4, tied: bool = False) -> Cost:
    """The embedding of a vocabulary; `share` counts the head as a second table where it is not `tied`."""
    parameters = vocab * width
    tables = parameters * (1 if tied else 2)
    return Cost(vocab, parameters, parameters * number_bytes, tables / (tables + 12 * layers * width**2))


def table(sizes: list[int], width: int = FULL[0], layers: int = FULL[1], number_bytes: int = 4) -> list[dict[str, Any]]:
    """`cost` of each size, smallest first."""
    return [asdict(cost(vocab, width, layers, number_bytes)) for vocab in sorted(set(sizes))]


def smaller(tokenizer: Tokenizer) -> Iterator[Tokenizer]:
    """The tokenizers that training would have ended with at smaller vocabularies, smallest first, then the given one.

    Sizes double from 512. A vocabulary that is not built by merges, or has its ids in another order, holds none.
    """
    merged = _merges(tokenizer)
    size = 2 * BYTES
    while merged and size < tokenizer.vocab:
        if (one := _cut(tokenizer, size)) is not None:
            yield one
        size *= 2
    yield tokenizer


def _merges(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, ByteBPE) or tokenizer.kind == "sentencepiece-bpe"


def _cut(tokenizer: Tokenizer, vocab: int) -> Tokenizer | None:
    """The tokenizer after the first merges, with `vocab` ids; None where its alphabet alone is larger."""
    ordinary = vocab - len(SPECIALS)
    if isinstance(tokenizer, ByteBPE):
        return ByteBPE(tokenizer.tokens[:ordinary], tokenizer.pattern, tokenizer.template)
    assert isinstance(tokenizer, LibraryTokenizer)
    model = tokenizer.data["model"]
    if any(id >= ordinary for piece, id in model["vocab"].items() if len(piece) == 1):
        return None
    pieces = {piece: id for piece, id in model["vocab"].items() if id < ordinary}
    merges = list(itertools.takewhile(lambda pair: "".join(pair) in pieces, model["merges"]))
    specials = [{**t, "id": ordinary + n} for n, t in enumerate(tokenizer.data["added_tokens"])]
    data = {**tokenizer.data, "added_tokens": specials}
    data["model"] = {**model, "vocab": pieces, "merges": merges}
    return LibraryTokenizer(tokenizer.kind, data, tokenizer.names, tokenizer.template)
