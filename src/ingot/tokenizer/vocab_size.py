"""The cost of a vocabulary size: a larger vocabulary makes texts shorter and the embedding larger.

    embedding bytes = V x d x bytes per number             50,000 x 4,096 x 4 = 819,200,000

A BPE contains every smaller BPE, whose vocabulary is its first merges, so one trained tokenizer measures all sizes.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_tokenizers import HFTokenizer
from ingot.tokenizer.settings import BYTES, SPECIALS

PRESETS = (32_000, 50_257, 100_000, 128_000)
"""Common sizes: LLaMA's, GPT-2's, and those of later models."""
WIDTH_7B, LAYERS_7B = 4096, 32
"""Width and layers of a model with 7B parameters."""


@dataclass(frozen=True)
class Cost:
    """The cost of a vocabulary in a model."""

    vocab: int
    parameters: int
    """Parameters of one table, vocab x width."""
    bytes: int
    """Size of one table."""
    fraction: float
    """Fraction of the model's parameters in its tables; the blocks have 12 x layers x width^2."""


def cost(vocab: int, width: int = WIDTH_7B, layers: int = LAYERS_7B, number_bytes: int = 4, tied: bool = False) -> Cost:
    """The cost of the embedding; `fraction` includes the LM head as a second table unless `tied`."""
    parameters = vocab * width
    tables = parameters * (1 if tied else 2)
    return Cost(vocab, parameters, parameters * number_bytes, tables / (tables + 12 * layers * width**2))


def table(
    sizes: list[int], width: int = WIDTH_7B, layers: int = LAYERS_7B, number_bytes: int = 4
) -> list[dict[str, Any]]:
    """`cost` of each size in ascending order."""
    return [asdict(cost(vocab, width, layers, number_bytes)) for vocab in sorted(set(sizes))]


def nested(tokenizer: Tokenizer) -> Iterator[Tokenizer]:
    """The smaller tokenizers that the same training gives at sizes 512, 1024, ..., then the tokenizer itself.

    Types without merges, and imported files, have no smaller ones.
    """
    size = 2 * BYTES
    while _has_merges(tokenizer) and size < tokenizer.vocab:
        if (truncated := _truncate(tokenizer, size)) is not None:
            yield truncated
        size *= 2
    yield tokenizer


def _has_merges(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, ByteBPE) or tokenizer.kind in ("sentencepiece-bpe", "end-of-word-bpe")


def _truncate(tokenizer: Tokenizer, vocab: int) -> Tokenizer | None:
    """The tokenizer after its first merges, with `vocab` ids; None if its alphabet alone is larger."""
    ordinary = vocab - len(SPECIALS)
    if isinstance(tokenizer, ByteBPE):
        return ByteBPE(tokenizer.tokens[:ordinary], tokenizer.pattern, tokenizer.template)
    assert isinstance(tokenizer, HFTokenizer)
    model = tokenizer.data["model"]
    merged = {"".join(pair) for pair in model["merges"]}
    if any(id >= ordinary for piece, id in model["vocab"].items() if piece not in merged):
        return None
    pieces = {piece: id for piece, id in model["vocab"].items() if id < ordinary}
    merges = list(itertools.takewhile(lambda pair: "".join(pair) in pieces, model["merges"]))
    specials = [{**t, "id": ordinary + n} for n, t in enumerate(tokenizer.data["added_tokens"])]
    data = {**tokenizer.data, "added_tokens": specials}
    data["model"] = {**model, "vocab": pieces, "merges": merges}
    return HFTokenizer(tokenizer.kind, data, tokenizer.special_tokens_map, tokenizer.template)
