"""The trainer of each subword type: texts in memory -> tokenizer.

All types use the same pre-tokenisation (words with the space before them, runs of symbols, pairs of digits), so their
vocabularies are comparable. Pieces contain the space itself and not SentencePiece's `▁`, which is ambiguous if the text
contains one; characters outside the alphabet are encoded as bytes. Hence all subword types are lossless.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import rustbpe
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ingot.core.errors import UserError
from ingot.core.events import Bar, Display
from ingot.tokenizer import unigram, wordpiece
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_decoders import byte_letters
from ingot.tokenizer.hf_tokenizers import HFTokenizer, added_tokens, backend_data, load_backend
from ingot.tokenizer.settings import BYTES, SPECIAL_TOKENS_MAP, SPECIALS, TURNS, TokenizerSettings

UNKNOWN = "<unk>"
END_OF_WORD = "</w>"
"""Suffix of a piece at the end of a word."""
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
"""`settings.PATTERN` with bounded runs, because WordPiece takes quadratic time in the length of a word."""
COVERAGE = 0.9995
"""Fraction of the text's characters in the alphabet; others are encoded as bytes (SentencePiece's default)."""
MAX_WORDS = 300_000
"""Number of most frequent words that WordPiece and Unigram are trained on."""


def byte_bpe(settings: TokenizerSettings, texts: list[str], display: Display) -> ByteBPE:
    """Byte-level BPE, trained by rustbpe."""
    assert settings.vocab is not None
    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
    try:
        with _reading(texts, display) as read:
            trainer.train_from_iterator(read, settings.vocab - len(SPECIALS), pattern=settings.pattern)
    except ValueError as error:
        raise UserError(f"tokenizer pattern {settings.pattern!r}: {error}; fix the expression") from None
    except BaseException as error:  # a Rust panic is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer pattern {settings.pattern!r}: {error}; bound its repetitions") from None
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    _check_size(settings.vocab, len(tokens), texts, "256 bytes, their merges and the special tokens")
    return ByteBPE(tokens, settings.pattern)


def sentencepiece_bpe(settings: TokenizerSettings, texts: list[str], display: Display) -> HFTokenizer:
    """BPE over characters with byte fallback, as in SentencePiece and LLaMA."""
    assert settings.vocab is not None
    ordinary = settings.vocab - len(SPECIALS)
    alphabet = _alphabet(texts, (ordinary - BYTES) // 2)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=ordinary,
        special_tokens=_byte_pieces(),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    with _reading(texts, display) as read:
        backend.train_from_iterator(read, trainer)
    learned = backend_data(backend)["model"]
    _check_size(settings.vocab, len(learned["vocab"]), texts, "256 bytes, characters, their merges and special tokens")
    model = {"type": "BPE", "vocab": learned["vocab"], "merges": learned["merges"], "byte_fallback": True}
    return _tokenizer(settings, model, [_split()], [{"type": "ByteFallback"}, {"type": "Fuse"}])


def end_of_word_bpe(settings: TokenizerSettings, texts: list[str], display: Display) -> HFTokenizer:
    """BPE whose last piece of a word carries the marker `</w>` (Sennrich et al. 2016), over bytes.

    In the paper the marker also stands for the blank after the word. Here a word contains the blank before it, so that
    the marker adds no text and nothing is lost. No word can contain `</w>` itself: it is two runs of symbols and a
    letter (`WORDS`), so the marker of a piece is never ambiguous.
    """
    assert settings.vocab is not None
    letters = [letter for _, letter in sorted(byte_letters().items())]
    backend = Backend(models.BPE(end_of_word_suffix=END_OF_WORD))
    steps = [_split(), _byte_level()]
    backend.pre_tokenizer = load_backend(_data({"type": "BPE", "vocab": {}, "merges": []}, steps, [], {})).pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab - len(SPECIALS),
        special_tokens=[*letters, *(letter + END_OF_WORD for letter in letters)],  # in an order that breaks ties
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    with _reading(texts, display) as read:
        backend.train_from_iterator(read, trainer)
    learned = backend_data(backend)["model"]
    parts = "256 bytes in two forms, their merges and the special tokens"
    _check_size(settings.vocab, len(learned["vocab"]), texts, parts)
    model = {name: learned[name] for name in ("type", "vocab", "merges", "end_of_word_suffix")}
    remove_marker = {"type": "Replace", "pattern": {"Regex": f"{END_OF_WORD}$"}, "content": ""}
    return _tokenizer(settings, model, steps, [remove_marker, _byte_level()])


def unigram_model(settings: TokenizerSettings, texts: list[str], display: Display) -> HFTokenizer:
    """Unigram with byte fallback: the most probable segmentation of each word."""
    assert settings.vocab is not None
    ordinary = settings.vocab - len(SPECIALS) - BYTES
    alphabet = _alphabet(texts, ordinary // 2)
    words, counts = count_words(texts, [_split()], display)
    in_alphabet = [set(word) <= set(alphabet) for word in words]
    words, counts = [word for word, ok in zip(words, in_alphabet, strict=True) if ok], counts[in_alphabet]
    with display.bar("choosing pieces", total=unigram.MAX_PASSES, unit="passes") as bar:
        pieces, logp = unigram.learn(words, counts, alphabet, ordinary, progress=bar.advance)
    _check_size(settings.vocab, BYTES + len(pieces), texts, "256 bytes, the pieces and the special tokens")
    scores = [float(logp.min())] * BYTES + logp.tolist()
    vocab = [[piece, score] for piece, score in zip([*_byte_pieces(), *pieces], scores, strict=True)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}  # byte fallback replaces unk_id
    return _tokenizer(settings, model, [_split()], [{"type": "ByteFallback"}, {"type": "Fuse"}])


def wordpiece_model(settings: TokenizerSettings, texts: list[str], display: Display) -> HFTokenizer:
    """WordPiece over bytes: words are split greedily into the longest pieces from the left."""
    assert settings.vocab is not None
    ordinary = settings.vocab - len(SPECIALS)
    hashes = {"type": "Split", "pattern": {"String": "#"}, "behavior": "Isolated", "invert": False}
    steps = [
        hashes,
        _split(),
        _byte_level(),
    ]  # isolates each `#` of the text, so that `##` is always the prefix of a piece
    words, counts = count_words(texts, steps, display)
    alphabet = [letter for _, letter in sorted(byte_letters().items())]
    with display.bar("merging", total=ordinary, unit="pieces", done=2 * BYTES) as bar:
        learn = wordpiece.learn_pieces
        pieces = learn(words, counts, alphabet, ordinary, progress=lambda size: bar.advance(size - bar.done))
    _check_size(settings.vocab, len(pieces), texts, "256 bytes in two forms, their merges and the special tokens")
    model = {
        "type": "WordPiece",
        "unk_token": pieces[0],  # required by the library; unused, since all bytes are in the vocabulary
        "continuing_subword_prefix": wordpiece.CONTINUING_PREFIX,
        "max_input_chars_per_word": 1000,
        "vocab": {piece: n for n, piece in enumerate(pieces)},
    }
    remove_prefix = {"type": "Replace", "pattern": {"Regex": f"^{wordpiece.CONTINUING_PREFIX}"}, "content": ""}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer(settings, model, steps, [remove_prefix, to_bytes])


def word_model(settings: TokenizerSettings, texts: list[str], display: Display) -> HFTokenizer:
    """The most frequent words and runs of symbols. Spaces are lost, and other words become `<unk>`."""
    steps = [{"type": "Whitespace"}]
    words, _ = count_words(texts, steps, display, max_words=(settings.vocab or 2**31) - 1)
    vocab = {word: n for n, word in enumerate([UNKNOWN, *words])}
    data = _data({"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN}, steps, [], {})
    return HFTokenizer(settings.type, data, {"unk_token": UNKNOWN})


def count_words(
    texts: list[str], steps: list[dict[str, Any]], display: Display, max_words: int = MAX_WORDS
) -> tuple[list[str], np.ndarray]:
    """The distinct words and their counts [n], sorted by descending count, then alphabetically.

    Args:
        texts: the texts to split and count.
        steps: the pre-tokenizers, as in `tokenizer.json`.
        display: shows progress.
        max_words: maximum number of words to return.
    """
    backend = load_backend(_data({"type": "WordLevel", "vocab": {}, "unk_token": UNKNOWN}, steps, [], {}))
    with display.bar("counting words", total=2 * sum(map(len, texts)), unit="characters") as bar:
        trainer = trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False)
        backend.train_from_iterator(_with_progress(texts, bar), trainer)
        ids = backend.get_vocab()
        counts = np.zeros(len(ids), dtype=np.int64)
        for batch in _batches(_with_progress(texts, bar)):
            for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
                counts += np.bincount(encoding.ids, minlength=len(ids))
    ranked = sorted(ids, key=lambda word: (-counts[ids[word]], word))[:max_words]
    return ranked, counts[[ids[word] for word in ranked]]


def _tokenizer(
    settings: TokenizerSettings, model: dict[str, Any], steps: list[dict[str, Any]], decoders: list[dict[str, Any]]
) -> HFTokenizer:
    """A tokenizer with the special tokens at the end of the vocabulary."""
    first = len(model["vocab"])
    data = _data(model, steps, decoders, {name: first + n for n, name in enumerate(SPECIALS)})
    return HFTokenizer(settings.type, data, SPECIAL_TOKENS_MAP, TURNS)


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


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(BYTES)]


def _alphabet(texts: list[str], max_size: int) -> list[str]:
    """The most frequent characters that make up `COVERAGE` of the text, at most `max_size`."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        unique, times = np.unique(points, return_counts=True)
        counts[unique] += times
    order = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[order]) / max(1, counts.sum())
    size = int(np.searchsorted(covered, COVERAGE)) + 1
    return sorted(chr(point) for point in order[: min(size, max_size, np.count_nonzero(counts))])


def _check_size(vocab: int, learned: int, texts: list[str], parts: str) -> None:
    if learned + len(SPECIALS) < vocab:
        total = sum(len(text.encode()) for text in texts)
        raise UserError(
            f"tokenizer: vocab = {vocab:,}, but {total:,} bytes of text only give {learned + len(SPECIALS):,} "
            f"({parts}); lower vocab or add text"
        )


@contextlib.contextmanager
def _reading(texts: list[str], display: Display) -> Iterator[Iterator[str]]:
    """Yield an iterator over the texts that advances a progress bar."""
    with display.bar("reading text", total=sum(map(len, texts)), unit="characters") as bar:
        yield _with_progress(texts, bar)


def _with_progress(texts: list[str], bar: Bar) -> Iterator[str]:
    for text in texts:
        yield text
        bar.advance(len(text))


def _batches(texts: Iterator[str], size: int = 8) -> Iterator[list[str]]:
    while batch := list(itertools.islice(texts, size)):
        yield batch
