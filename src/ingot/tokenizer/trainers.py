"""One trainer a subword type: texts in memory to a vocabulary.

All types split text alike before they learn (at words, runs of signs, pairs of digits; a space goes with the word after
it), so that their vocabularies compare like with like. Pieces hold the space itself. SentencePiece writes it as `▁` and
cannot tell it from a `▁` in the text; with the space itself, and single bytes for what an alphabet lacks, every text
comes back to the byte.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import rustbpe
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from ingot.core.errors import UserError
from ingot.core.events import Bar, Display
from ingot.tokenizer import unigram, wordpiece
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_tokenizers import LibraryTokenizer, added_tokens, byte_letters, library_data, read_library
from ingot.tokenizer.settings import BYTES, ROLES_OF_SPECIALS, SPECIALS, TURNS, TokenizerSettings

UNKNOWN = "<unk>"
WORDS = "|".join(
    (
        r"'(?i:[stdm]|ll|ve|re)",
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]{1,64}",
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{M}\p{N}]{1,64}[\r\n]{0,64}",
        r"\s{0,64}[\r\n]{1,64}",
        r"\s{1,64}(?!\S)",
        r"\s",
    )
)
"""The split of a byte-level BPE with all runs bounded: WordPiece takes time that grows with the square of a word."""
COVERAGE = 0.9995
"""Share of the text's characters that have pieces of their own; the others are spelled in bytes (SentencePiece's)."""
MOST_WORDS = 300_000
"""Distinct words that WordPiece and Unigram learn from; the rarest beyond them are left out."""


def byte_bpe(settings: TokenizerSettings, texts: list[str], display: Display) -> ByteBPE:
    """Byte-level BPE: rustbpe learns its merges, tiktoken applies them."""
    assert settings.vocab is not None
    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
    try:
        with _reading(texts, display) as read:
            trainer.train_from_iterator(read, settings.vocab - len(SPECIALS), pattern=settings.pattern)
    except ValueError as error:
        raise UserError(f"tokenizer pattern {settings.pattern!r}: {error}; mend the expression") from None
    except BaseException as error:  # a Rust panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer pattern {settings.pattern!r}: {error}; bound its repetitions") from None
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    _check_size(settings.vocab, len(tokens), texts, "256 bytes, their merges and the special tokens")
    return ByteBPE(tokens, settings.pattern)


def sentencepiece_bpe(settings: TokenizerSettings, texts: list[str], display: Display) -> LibraryTokenizer:
    """BPE over characters, with bytes for the rare ones: SentencePiece's, as the LLaMA family uses it."""
    assert settings.vocab is not None
    room = settings.vocab - len(SPECIALS)
    alphabet = _alphabet(texts, (room - BYTES) // 2)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        special_tokens=_byte_pieces(),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    with _reading(texts, display) as read:
        library.train_from_iterator(read, trainer)
    learned = library_data(library)["model"]
    _check_size(settings.vocab, len(learned["vocab"]), texts, "256 bytes, characters, their merges and special tokens")
    model = {"type": "BPE", "vocab": learned["vocab"], "merges": learned["merges"], "byte_fallback": True}
    return _tokenizer(settings, model, [_split()], [{"type": "ByteFallback"}, {"type": "Fuse"}])


def unigram_model(settings: TokenizerSettings, texts: list[str], display: Display) -> LibraryTokenizer:
    """Unigram: a word is cut into its likeliest pieces; bytes for rare characters."""
    assert settings.vocab is not None
    room = settings.vocab - len(SPECIALS) - BYTES
    alphabet = _alphabet(texts, room // 2)
    words, counts = count_words(texts, [_split()], display)
    spelled = [set(word) <= set(alphabet) for word in words]
    words, counts = [word for word, ok in zip(words, spelled, strict=True) if ok], counts[spelled]
    with display.bar("choosing pieces", total=unigram.LOOPS, unit="passes") as bar:
        pieces, logp = unigram.learn(words, counts, alphabet, room, progress=bar.advance)
    _check_size(settings.vocab, BYTES + len(pieces), texts, "256 bytes, the pieces and the special tokens")
    scores = [float(logp.min())] * BYTES + logp.tolist()
    vocab = [[piece, score] for piece, score in zip([*_byte_pieces(), *pieces], scores, strict=True)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}  # unk is never used: bytes
    return _tokenizer(settings, model, [_split()], [{"type": "ByteFallback"}, {"type": "Fuse"}])


def wordpiece_model(settings: TokenizerSettings, texts: list[str], display: Display) -> LibraryTokenizer:
    """WordPiece over bytes: a word is cut greedily into its longest pieces from the left."""
    assert settings.vocab is not None
    room = settings.vocab - len(SPECIALS)
    hashes = {"type": "Split", "pattern": {"String": "#"}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [hashes, _split(), letters]  # `#` alone, so that `##` never stands for two signs of the text
    words, counts = count_words(texts, steps, display)
    alphabet = [letter for _, letter in sorted(byte_letters().items())]
    with display.bar("merging", total=room, unit="pieces", done=2 * BYTES) as bar:
        learn = wordpiece.learn_pieces
        pieces = learn(words, counts, alphabet, room, progress=lambda found: bar.advance(found - bar.done))
    _check_size(settings.vocab, len(pieces), texts, "256 bytes in two forms, their merges and the special tokens")
    model = {
        "type": "WordPiece",
        "unk_token": pieces[0],  # the library wants one; with all bytes in the vocabulary it is never used
        "continuing_subword_prefix": wordpiece.CONTINUES,
        "max_input_chars_per_word": 1000,
        "vocab": {piece: n for n, piece in enumerate(pieces)},
    }
    unmark = {"type": "Replace", "pattern": {"Regex": f"^{wordpiece.CONTINUES}"}, "content": ""}
    spell = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer(settings, model, steps, [unmark, spell])


def word_model(settings: TokenizerSettings, texts: list[str], display: Display) -> LibraryTokenizer:
    """Words and runs of signs, the commonest first; spaces are dropped, and a word that is not known is `<unk>`."""
    steps = [{"type": "Whitespace"}]
    words, _ = count_words(texts, steps, display, most=(settings.vocab or 2**31) - 1)
    vocab = {word: n for n, word in enumerate([UNKNOWN, *words])}
    data = _data({"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN}, steps, [], {})
    return LibraryTokenizer(settings.type, data, {"unk_token": UNKNOWN})


def count_words(
    texts: list[str], steps: list[dict[str, Any]], display: Display, most: int = MOST_WORDS
) -> tuple[list[str], np.ndarray]:
    """The distinct words of texts and how often each occurs, the commonest first, of equal ones the lower letters.

    Args:
        texts: what to count in.
        steps: what splits a text, as in `tokenizer.json`.
        most: how many words are kept.
    """
    library = read_library(_data({"type": "WordLevel", "vocab": {}, "unk_token": UNKNOWN}, steps, [], {}))
    with display.bar("counting words", total=2 * sum(map(len, texts)), unit="characters") as bar:
        trainer = trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False)
        library.train_from_iterator(_taken(texts, bar), trainer)
        ids = library.get_vocab()
        counts = np.zeros(len(ids), dtype=np.int64)
        for part in _parts(_taken(texts, bar)):
            for encoding in library.encode_batch_fast(part, add_special_tokens=False):
                counts += np.bincount(encoding.ids, minlength=len(ids))
    ranked = sorted(ids, key=lambda word: (-counts[ids[word]], word))[:most]
    return ranked, counts[[ids[word] for word in ranked]]


def _tokenizer(
    settings: TokenizerSettings, model: dict[str, Any], steps: list[dict[str, Any]], decoders: list[dict[str, Any]]
) -> LibraryTokenizer:
    """With the special block at the end of the vocabulary."""
    first = len(model["vocab"])
    data = _data(model, steps, decoders, {name: first + n for n, name in enumerate(SPECIALS)})
    return LibraryTokenizer(settings.type, data, ROLES_OF_SPECIALS, TURNS)


def _data(
    model: dict[str, Any], steps: list[dict[str, Any]], decoders: list[dict[str, Any]], specials: dict[str, int]
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": added_tokens(specials),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders} if decoders else None,
        "model": model,
    }


def _split() -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(BYTES)]


def _alphabet(texts: list[str], most: int) -> list[str]:
    """The commonest characters that make up `COVERAGE` of the text, at most `most`."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        found, times = np.unique(points, return_counts=True)
        counts[found] += times
    order = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[order]) / max(1, counts.sum())
    enough = int(np.searchsorted(covered, COVERAGE)) + 1
    kept = order[: min(enough, most, np.count_nonzero(counts))]
    return sorted(chr(point) for point in kept)


def _check_size(wanted: int, learned: int, texts: list[str], what: str) -> None:
    if learned + len(SPECIALS) < wanted:
        total = sum(len(text.encode()) for text in texts)
        raise UserError(
            f"tokenizer: vocab = {wanted:,}, but {total:,} bytes of text only give {learned + len(SPECIALS):,} "
            f"({what}); lower vocab or add text"
        )


@contextlib.contextmanager
def _reading(texts: list[str], display: Display) -> Iterator[Iterator[str]]:
    """The texts, with a bar that counts their characters as a trainer takes them."""
    with display.bar("reading text", total=sum(map(len, texts)), unit="characters") as bar:
        yield _taken(texts, bar)


def _taken(texts: list[str], bar: Bar) -> Iterator[str]:
    for text in texts:
        yield text
        bar.advance(len(text))


def _parts(texts: Iterator[str], most: int = 8) -> Iterator[list[str]]:
    while part := list(itertools.islice(texts, most)):
        yield part
