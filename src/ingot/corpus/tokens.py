"""Words and marks as English tokenizers cut them, for rules whose published bounds count them.

Text is cut at blanks. Marks at the ends of what is left are tokens of their own, and so are a hyphen, comma, slash and
some other signs between letters: "(state-of-the-art)," has ten tokens, "don't" has two, "do" and "n't". These are the
rules of spaCy's English tokenizer without most of its list of exceptions. Bytes of other scripts count as letters.
"""

from typing import NamedTuple

import numpy as np

from ingot.corpus.dedup import blanks
from ingot.corpus.pieces import Pieces, split
from ingot.corpus.readers.utf8 import find_sequences

LETTER, DIGIT, UPPER, QUOTE, OPENING, CLOSING, LINK, OPERATOR = (1 << i for i in range(8))
"""What a byte is. LINK: a sign that cuts between letters. OPERATOR: one that cuts between digits."""
_STOP, _HYPHEN, _COMMA, _BLANK = ord("."), ord("-"), ord(","), ord(" ")


def _kinds() -> np.ndarray:
    """For each byte the sum of what it is; bytes of other scripts are letters."""
    kinds = np.zeros(256, np.uint8)
    kinds[0x80:] = LETTER
    for byte in range(0x80):
        kinds[byte] = LETTER * chr(byte).isalpha() + DIGIT * chr(byte).isdigit() + UPPER * chr(byte).isupper()
    for kind, characters in (
        (QUOTE, "'\"`"),
        (OPENING, "!\"#$%&'()*+,:;<=>?[]_`{}"),
        (CLOSING, "!\"#&'()*,:;<>?[]_`{}"),
        (LINK, ":<>=/"),
        (OPERATOR, "+-*^"),
    ):
        for character in characters:
            kinds[ord(character)] |= kind
    return kinds


_KINDS = _kinds()


class Tokens(NamedTuple):
    """The tokens of texts."""

    pieces: Pieces
    letters: np.ndarray
    """Whether a token has a letter."""
    words: np.ndarray
    """Whether a token has a letter or a digit; else it is a mark."""


def tokens(data: np.ndarray, starts: np.ndarray) -> Tokens:
    """The tokens of texts.

    Args:
        data: UTF-8 of all texts.
        starts: the first byte of each text, and the end.
    """
    pieces, letters, words = _tokens(*_apart(data, starts))
    shift = np.repeat(np.arange(len(starts) - 1), pieces.counts)
    return Tokens(Pieces(pieces.heads - shift, pieces.ends - shift, pieces.starts), letters, words)


def _apart(data: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The texts with a blank after each but the last: what a byte is depends on its neighbours in its own text."""
    texts = len(starts) - 1
    return np.insert(data, starts[1:-1], _BLANK), starts + np.minimum(np.arange(texts + 1), max(0, texts - 1))


def _tokens(data: np.ndarray, starts: np.ndarray) -> Tokens:
    part = ~blanks(data)
    words = split(part, starts)
    kinds = _KINDS[data] * part
    for places, size in _signs(data):
        for offset in range(size):
            kinds[places + offset] = OPENING | CLOSING
    before, after = _shifted(kinds)
    _close_sentences(data, kinds, before)
    begins = np.zeros(len(data) + 1, bool)
    # marks before and after the core of each word
    core = np.flatnonzero(part & (kinds & OPENING == 0))
    first = np.minimum(np.append(core, len(data))[np.searchsorted(core, words.heads)], words.ends)
    core = np.flatnonzero(part & (kinds & CLOSING == 0))
    last = np.maximum(np.append(-1, core)[np.searchsorted(core, words.ends)] + 1, first)
    begins[_ranges(words.heads, first)] = begins[_ranges(last, words.ends)] = True
    begins[first] = begins[last] = True
    stops, follows, precedes = _stops(data)
    begins[stops[follows]] = False  # full stops in a row are one token
    begins[stops[precedes & ~follows]] = begins[stops[follows & ~precedes] + 1] = True
    # signs between letters
    cuts = _cuts(data, kinds, before, after)
    addresses = words.heads.searchsorted(_addresses(data), side="right") - 1
    cuts = np.setdiff1d(cuts, _ranges(first[addresses], last[addresses]), assume_unique=True)
    begins[cuts] = begins[cuts + 1] = True
    begins[_contractions(data, kinds & LETTER != 0)] = True
    # a character of several bytes begins at its first
    pieces = split(part, starts, begins[:-1] & ((data & 0xC0) != 0x80) & part)
    if not len(pieces.heads):
        return Tokens(pieces, np.zeros(0, bool), np.zeros(0, bool))
    has = np.bitwise_or.reduceat(kinds, pieces.heads)  # between tokens are blanks alone, which are nothing
    return Tokens(pieces, has & LETTER != 0, has & (LETTER | DIGIT) != 0)


def _shifted(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the bytes before and after each one are."""
    nothing = np.zeros(1, kinds.dtype)
    return np.concatenate([nothing, kinds[:-1]]), np.concatenate([kinds[1:], nothing])


def _stops(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Full stops, and whether each follows or precedes another one directly."""
    stops = np.flatnonzero(data == _STOP)
    return stops, np.diff(stops, prepend=-2) == 1, np.diff(stops, append=-2) == 1


def _close_sentences(data: np.ndarray, kinds: np.ndarray, before: np.ndarray) -> None:
    """Mark, in place, the full stops that end a word: after a small letter, a digit, a mark or two capitals."""
    stops, follows, precedes = _stops(data)
    kind, second = before[stops], before[np.maximum(stops - 1, 0)]
    small = (kind & LETTER != 0) & (kind & UPPER == 0)
    capitals = (kind & UPPER != 0) & (second & UPPER != 0)
    closes = small | capitals | (kind & (DIGIT | CLOSING) != 0)
    in_a_row = follows | precedes
    kinds[stops[closes | in_a_row]] |= CLOSING
    kinds[stops[in_a_row]] |= OPENING


def _cuts(data: np.ndarray, kinds: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where signs stand between letters or digits."""
    places = np.flatnonzero((kinds & (LINK | OPERATOR) != 0) | (data == _COMMA) | (data == _STOP))
    sign, kind, left, right = data[places], kinds[places], before[places], after[places]
    letters = (left & LETTER != 0) & (right & LETTER != 0)
    named = (left & (LETTER | DIGIT) != 0) & (right & LETTER != 0)
    digits = (left & DIGIT != 0) & ((right & DIGIT != 0) | (data[np.minimum(places + 1, len(data) - 1)] == _HYPHEN))
    small = (left & QUOTE != 0) | ((left & LETTER != 0) & (left & UPPER == 0))
    is_cut = (named & ((kind & LINK != 0) | (sign == _HYPHEN))) | (letters & (sign == _COMMA))
    is_cut |= digits & (kind & OPERATOR != 0)
    is_cut |= (sign == _STOP) & small & (right & (UPPER | QUOTE) != 0)
    return places[is_cut]


def _ranges(heads: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """All numbers in some ranges, which may be empty."""
    sizes = ends - heads
    return (
        np.repeat(heads - np.append(0, np.cumsum(sizes)[:-1]), sizes) + np.arange(sizes.sum()) if len(sizes) else heads
    )


def _addresses(data: np.ndarray) -> np.ndarray:
    """Where "://" stands; such a word is not cut."""
    colons = np.flatnonzero(data[:-2] == ord(":"))
    return colons[(data[colons + 1] == ord("/")) & (data[colons + 2] == ord("/"))]


def _signs(data: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The first bytes and sizes of characters that are marks: dashes, quotation marks, symbols, emoji."""
    three = np.flatnonzero((data == 0xE2) | (data == 0xE3))
    code = data[three].astype(np.int64) << 16 | data[three + 1].astype(np.int64) << 8 | data[three + 2]
    is_mark = ((code >= 0xE28090) & (code < 0xE280C0)) | ((code >= 0xE28480) & (code < 0xE2B000))
    is_mark |= (code >= 0xE38080) & (code < 0xE380A0)
    four = np.flatnonzero(data == 0xF0)
    return [(three[is_mark], 3), (four[data[four + 1] == 0x9F], 4)]


def _contractions(data: np.ndarray, letter: np.ndarray) -> np.ndarray:
    """Where the second part of contractions begins: 's, 'd, 'm, 're, 've, 'll, n't."""
    padded, is_letter = np.append(data, np.zeros(4, np.uint8)), np.append(letter, np.zeros(4, bool))
    found = []
    for places, size in ((np.flatnonzero(data == ord("'")), 1), (find_sequences(data, 0xE2, [0x8099]), 3)):
        places = places[(places > 0) & is_letter[places - 1]]
        one, two = padded[places + size], padded[places + size + 1]
        short = np.isin(one, np.frombuffer(b"sSdm", np.uint8)) & ~is_letter[places + size + 1]
        pair = one.astype(np.uint16) * 256 + two
        long = np.isin(pair, [ord(a) * 256 + ord(b) for a, b in ("re", "ve", "ll")]) & ~is_letter[places + size + 2]
        negation = (one == ord("t")) & (padded[places - 1] == ord("n")) & ~is_letter[places + size + 1]
        found += [places[short | long], places[negation] - 1]
    return np.concatenate(found)
