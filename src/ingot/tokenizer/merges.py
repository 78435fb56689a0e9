"""The merges with which a trained BPE encodes a text, step by step.

A BPE applies its merges in the order in which it learned them. No merge crosses the border of a final token, so each
token's merges follow from its own symbols, however the tokenizer splits the text into words.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_tokenizers import HFTokenizer, ids_of
from ingot.tokenizer.reference import Pair, Word, merge_pair
from ingot.tokenizer.settings import BYTES

Rank = Callable[[Pair], int | None]
"""Pair -> its number in the order of learning, from 1; None for a pair that is no merge."""


@dataclass(frozen=True)
class AppliedMerge:
    """A merge that a text needs."""

    number: int
    """It was learned as the `number`-th."""
    pair: Pair
    count: int
    """Times that it is applied."""
    tokens: list[Word]
    """The symbols of each final token after it."""


def applied_merges(tokenizer: Tokenizer, text: str) -> tuple[list[Word], list[AppliedMerge]]:
    """The symbols of each final token of a text before the first merge, and the merges in order.

    A symbol of a byte-level BPE has one character for each byte, the one with its number (`symbol_text` decodes it).
    Tokens that no merges lead to, such as the bytes of a character outside the vocabulary, are one symbol.

    Raises:
        UserError: the tokenizer has no merges, or cannot encode the text.
    """
    rank, spelling = _rank(tokenizer), _spelling(tokenizer)
    pieces = [spelling[id] for id in tokenizer.encode(text).tolist()]
    symbols = [(_symbols(tokenizer, piece), piece) for piece in pieces]
    start = [word if len(_merge_all(word, rank)) == 1 else (piece,) for word, piece in symbols]
    tokens, merges = start, list[AppliedMerge]()
    while pair := _first(tokens, rank):
        size = sum(map(len, tokens))
        tokens = [merge_pair(token, pair) for token in tokens]
        number = rank(pair)
        assert number is not None
        merges.append(AppliedMerge(number, pair, size - sum(map(len, tokens)), tokens))
    return start, merges


def symbol_text(tokenizer: Tokenizer, symbol: str) -> str:
    """A symbol for people; bytes that are no complete character become escapes such as `\\xc3`."""
    return symbol.encode("latin-1").decode(errors="backslashreplace") if isinstance(tokenizer, ByteBPE) else symbol


def _rank(tokenizer: Tokenizer) -> Rank:
    if isinstance(tokenizer, ByteBPE):
        ids = {token.decode("latin-1"): id for id, token in enumerate(tokenizer.tokens)}
        return lambda pair: None if (id := ids.get("".join(pair))) is None else id - BYTES + 1
    model = tokenizer.data["model"] if isinstance(tokenizer, HFTokenizer) else {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UserError(
            f"--steps: found a tokenizer of type {tokenizer.kind}, which has no merges, expected a BPE; leave out "
            "--steps to see the tokens of a text, or the stage to see how merges are learned"
        )
    pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
    return {pair: number for number, pair in enumerate(pairs, 1)}.get


def _spelling(tokenizer: Tokenizer) -> dict[int, str]:
    """Id -> its symbols, one after the other."""
    if isinstance(tokenizer, ByteBPE):
        return {id: token.decode("latin-1") for id, token in enumerate(tokenizer.tokens)}
    assert isinstance(tokenizer, HFTokenizer)
    return {id: piece for piece, id in ids_of(tokenizer.data).items()}


def _symbols(tokenizer: Tokenizer, piece: str) -> Word:
    """The characters of a piece, the last with the marker of the end of a word."""
    suffix = tokenizer.data["model"].get("end_of_word_suffix") if isinstance(tokenizer, HFTokenizer) else None
    if not suffix or not piece.endswith(suffix) or piece == suffix:
        return tuple(piece)
    *inner, last = piece.removesuffix(suffix)
    return (*inner, last + suffix)


def _merge_all(token: Word, rank: Rank) -> Word:
    while pair := _first([token], rank):
        token = merge_pair(token, pair)
    return token


def _first(tokens: list[Word], rank: Rank) -> Pair | None:
    """The earliest merge that applies to any of the tokens, or None."""
    pairs = dict.fromkeys(pair for token in tokens for pair in itertools.pairwise(token))
    ranked = [(number, pair) for pair in pairs if (number := rank(pair)) is not None]
    return min(ranked, key=lambda item: item[0])[1] if ranked else None
