"""What the published quality rules measure of a document: words, lines, sentences, repetition.

Each function measures a chunk of texts with numpy or Polars, without a loop over words.

Shapes: B bytes, N documents, P words or lines.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import polars as pl

from ingot.corpus.dedup import blanks
from ingot.corpus.pieces import Pieces, chunks, hashes, mix, runs, split
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.tokens import Tokens, tokens

Measures = dict[str, np.ndarray]
"""Measure -> its value for each document, N."""
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without blanks between words, for a regular expression."""
_LEAST_UNSPACED = 0.3
_NEWLINE = 0x0A
REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""Length of a run of words -> most characters in repeated ones, as a fraction; from it on they are counted exactly."""


def is_unspaced(texts: pl.Series) -> pl.Series:
    """Whether at least 30 % of the characters are of a script without blanks between words."""
    return texts.str.count_matches(f"[{UNSPACED}]") >= _LEAST_UNSPACED * texts.str.len_chars().clip(1)


class Chunk:
    """Some texts, and what several measures need of them."""

    def __init__(self, texts: pl.Series, data: np.ndarray, starts: np.ndarray):
        self.texts, self.data, self.starts = texts, data, starts

    @cached_property
    def before(self) -> np.ndarray:
        """Characters before each byte, B + 1."""
        return np.append(0, np.cumsum((self.data & 0xC0) != 0x80))

    @cached_property
    def characters(self) -> np.ndarray:
        """Characters of each text, N."""
        return np.diff(self.before[self.starts])

    @cached_property
    def newline(self) -> np.ndarray:
        return self.data == _NEWLINE

    @cached_property
    def lines(self) -> Pieces:
        """Lines without empty ones."""
        return split(~self.newline, self.starts)

    @cached_property
    def tokens(self) -> Tokens:
        return tokens(self.data, self.starts)

    def sizes(self, pieces: Pieces) -> np.ndarray:
        """Characters of each piece, P."""
        return self.before[pieces.ends] - self.before[pieces.heads]


def in_chunks(texts: pl.Series) -> Iterator[Chunk]:
    """The texts, as many at once as fit the cache."""
    data, starts = flatten(texts)
    for part in chunks(data, starts):
        yield Chunk(texts[part.first : part.last], part.data, part.starts)


def _fraction(numbers: np.ndarray, of: np.ndarray) -> np.ndarray:
    return numbers / np.maximum(of, 1)


def _last_characters(data: np.ndarray, pieces: Pieces) -> np.ndarray:
    """The code point that ends each piece, P."""
    last = pieces.ends - 1
    code, shift, more = np.zeros(len(last), np.int64), np.zeros(len(last), np.int64), np.ones(len(last), bool)
    for _ in range(4):
        byte = data[np.maximum(last, 0)].astype(np.int64)
        continues = more & ((byte & 0xC0) == 0x80)
        lead = np.where(
            byte < 0x80, byte, np.where(byte < 0xE0, byte & 0x1F, np.where(byte < 0xF0, byte & 0xF, byte & 7))
        )
        code = np.where(more, code | (np.where(continues, byte & 0x3F, lead) << shift), code)
        more, shift, last = continues, shift + 6, last - 1
    return code


def _groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the keys in the order of their values, equal ones by position, and whether each is the first."""
    bits = np.uint64(max(1, len(keys).bit_length()))
    ordered = np.sort((keys >> bits << bits) | np.arange(len(keys), dtype=np.uint64))
    high = ordered >> bits
    first = np.ones(len(keys), bool)
    first[1:] = high[1:] != high[:-1]
    return (ordered & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64), first


def _repeated(keys: np.ndarray) -> np.ndarray:
    """Whether an equal key stands before each, P bool."""
    positions, first = _groups(keys)
    out = np.zeros(len(keys), bool)
    out[positions[~first]] = True
    return out


def _in_texts(hashes_P: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Hashes that are equal only within a text."""
    numbers = np.repeat(np.arange(1, len(pieces.counts) + 1, dtype=np.uint64), pieces.counts)
    return hashes_P ^ mix(numbers)


def repetition(chunk: Chunk) -> Measures:
    """Gopher's measures of repetition.

    Characters of a repeated run of words are counted where an equal run stands before it, each character once.
    """
    data, starts, newline, total = chunk.data, chunk.starts, chunk.newline, chunk.characters
    follows, precedes = np.append(False, newline[:-1]), np.append(newline[1:], False)
    follows[starts[:-1][starts[:-1] < len(data)]] = False
    precedes[starts[1:] - 1] = False
    out = {}
    paragraphs = split(~(newline & (follows | precedes)), starts)
    for name, pieces in (("line", chunk.lines), ("paragraph", paragraphs)):
        repeated = _repeated(_in_texts(hashes(data, pieces), pieces))
        sizes = chunk.sizes(pieces)
        out[f"repeated_{name}s"] = _fraction(pieces.sums(repeated), pieces.counts)
        out[f"repeated_{name}_characters"] = _fraction(pieces.sums(repeated * sizes), total)
    words = chunk.tokens.pieces
    sizes, word_hashes = chunk.sizes(words), _in_texts(hashes(data, words), words)
    for length in (2, 3, 4):
        out[f"top_{length}_words"] = _fraction(_most_frequent(word_hashes, sizes, words, length), total)
    open_ = np.ones(len(total), bool)
    for length, bound in REPEATED.items():
        at, found = runs(word_hashes, words, length)
        keys, again = np.zeros(len(sizes), np.uint64), np.zeros(len(sizes), bool)
        keys[at], again[at] = found, _repeated(found)
        most = np.where(open_, bound * total, total)
        fraction = _fraction(_without_overlap(again, keys, sizes, words, length, most), total)
        out[f"repeated_{length}_words"] = fraction
        open_ &= fraction <= bound
    return out


def _without_overlap(
    again: np.ndarray, keys: np.ndarray, sizes: np.ndarray, words: Pieces, length: int, most: np.ndarray
) -> np.ndarray:
    """Characters in runs of words that occurred before; a text is read on behind such a run. N.

    A text is read only if the characters in any repeated run are more than `most`; for the others this upper bound is
    returned. Reading is slow, so a text that breaks the rule of a shorter run is not read again.
    """
    through = np.append(0, np.cumsum(sizes))
    reached = np.maximum.accumulate(np.where(again, np.arange(len(sizes)), -length)) if len(sizes) else sizes
    out = words.sums((np.arange(len(sizes)) - reached < length) * sizes)
    for text in np.flatnonzero(out > most):
        first, last = int(words.starts[text]), int(words.starts[text + 1])
        own, is_again = keys[first:last].tolist(), again[first:last].tolist()
        end, characters, unseen = 0, 0, set()
        for at in np.flatnonzero(again[first:last]).tolist():
            if at < end:
                continue
            if own[at] in unseen:  # it occurred only inside a run that was counted
                unseen.discard(own[at])
                continue
            end = at + length
            characters += int(through[first + end] - through[first + at])
            unseen.update(own[i] for i in range(at + 1, min(end, len(own))) if not is_again[i])
        out[text] = characters
    return out


def _most_frequent(hashes_P: np.ndarray, sizes: np.ndarray, words: Pieces, length: int) -> np.ndarray:
    """Characters of all occurrences of the most frequent run of words of each text, N; the first one of equals."""
    begins, keys = runs(hashes_P, words, length)
    positions, first = _groups(keys)
    heads = np.flatnonzero(first)
    at = begins[positions[heads]]
    counts = np.diff(np.append(heads, len(positions)))
    through, out = np.append(0, np.cumsum(sizes)), np.zeros(len(words.counts), np.int64)
    texts = np.flatnonzero(words.counts)
    if not len(at):
        return out
    occurrences = np.zeros(len(sizes), np.int64)
    occurrences[at] = counts
    most = np.maximum.reduceat(occurrences, words.starts[texts])
    best = np.flatnonzero((occurrences == np.repeat(most, words.counts[texts])) & (occurrences > 0))
    text, first_of_text = np.unique(words.texts_of(best), return_index=True)
    best = best[first_of_text]
    out[text] = (through[best + length] - through[best] + length - 1) * occurrences[best]
    return out


_ENDS_LINE = np.array([ord(c) for c in ".!?։؝؞؟۔܀܁܂߹।॥၊။።፧፨᙮᜵᜶᠃᠉᥄᥅‼‽⁇⁈⁉⸮⸼。．！？｡"], dtype=np.int64)
"""Marks that end a sentence, of many scripts."""
_LINE = 30


def web_lines(chunk: Chunk) -> Measures:
    """FineWeb's measures of lines that are not blank."""
    data, lines, sizes = chunk.data, chunk.lines, chunk.sizes(chunk.lines)
    text = np.append(0, np.cumsum(~blanks(data)))
    full = text[lines.ends] > text[lines.heads]
    number = lines.sums(full)
    ends = np.isin(_last_characters(data, lines), _ENDS_LINE)
    repeated = np.zeros(len(sizes), bool)
    some = np.flatnonzero(full)
    repeated[some] = _repeated(_in_texts(hashes(data, lines), lines)[some])
    newlines = np.diff(np.append(0, np.cumsum(chunk.newline))[chunk.starts])
    return {
        "lines_with_an_end": np.where(number > 0, lines.sums(full & ends) / np.maximum(number, 1), 1.0),
        "short_lines": _fraction(lines.sums(full & (sizes <= _LINE)), number),
        "repeated_characters": _fraction(lines.sums(repeated * sizes), chunk.characters - newlines),
        "lines_per_word": _fraction(newlines, chunk.tokens.pieces.counts),
    }


_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


def quality(chunk: Chunk) -> Measures:
    """Gopher's measures of words and lines."""
    texts, count = chunk.texts, chunk.texts.str.count_matches
    pieces, letters, words = chunk.tokens
    number = pieces.sums(words)
    lines = count("\n", literal=True).to_numpy() + 1
    present = np.stack([texts.str.contains(rf"\b{word}\b").to_numpy() for word in _STOP_WORDS])
    return {
        "words": number,
        "word_length": pieces.sums(words * chunk.sizes(pieces)) / np.maximum(number, 1),
        "words_with_letters": _fraction(pieces.sums(letters), pieces.counts),
        "hashes_per_word": _fraction(count("#", literal=True).to_numpy(), pieces.counts),
        "ellipses_per_word": _fraction(count(r"\.\.\.|…").to_numpy(), pieces.counts),
        "bullet_lines": _fraction(count(r"(?m)^\s*[•\-]").to_numpy(), lines),
        "ellipsis_lines": _fraction(count(r"(?m)(?:\.\.\.|…)[^\S\n]*$").to_numpy(), lines),
        "stop_words": np.count_nonzero(present, axis=0),
    }


_SENTENCE_LINE = r"(?m)^[^\S\n]*\S+[^\S\n]+\S+[^\S\n]+\S[^\n]*$"
"""A line of three words or more."""
_ENDS, _CITATION = r"[.!?\"']$", r"\[\d*\]|\[edit\]|\[citation needed\]"
_NOT_READ = r"(?i)javascript|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"


def web_sentences(chunk: Chunk) -> Measures:
    """Sentences in the lines that C4 keeps, and what it forbids in lines that end like a sentence."""
    texts = chunk.texts
    lines = texts.str.extract_all(_SENTENCE_LINE)
    numbers = np.repeat(np.arange(len(texts)), lines.list.len().to_numpy())
    lines = lines.explode(empty_as_null=False).str.strip_chars().str.replace_all(_CITATION, "")
    read = lines.str.contains(_ENDS) & ~lines.str.ends_with("...") & ~lines.str.contains(r"\S{1001}")
    lines, numbers = lines.filter(read), numbers[read.to_numpy()]
    kept = ~lines.str.contains(_NOT_READ).to_numpy()
    sentences = lines.str.count_matches(_SENTENCE).to_numpy() + 1

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(numbers, values, minlength=len(texts))

    return {
        "lorem_ipsum": total(lines.str.contains("(?i)lorem ipsum").to_numpy()),
        "brackets": total(
            lines.str.contains("{", literal=True).to_numpy() & ~lines.str.contains("(?i)javascript").to_numpy()
        ),
        "sentences": total(kept * sentences),
    }


_SENTENCE = r"[^.\s]{2}[.!?][\"')\]]*\s+[\"'(\[]*[\p{Lu}\d]"
"""Where a sentence ends inside a line: not after an initial, and before a capital letter."""
