"""SPEC rows A3 and A5: merging as it is told, and the fast trainers and encoders against it."""

import random
from fractions import Fraction

import numpy as np
import pytest
import rustbpe

from ingot.tokenizer import trainers
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_decoders import byte_letters
from ingot.tokenizer.reference import (
    bpe,
    bpe_by_age,
    encode_bpe,
    encode_wordpiece,
    pair_counts,
    steps,
    symbols_of,
    wordpiece,
    wordpiece_score,
    words_of,
)
from ingot.tokenizer.settings import SPECIALS
from ingot.tokenizer.train import train
from ingot.tokenizer.wordpiece import learn_pieces
from tests.tokenizer.text_helpers import SOURCES, labelled, settings

TOLD = "low low low low low lowest lowest newer newer newer wider wider wider wider"


def test_A3_the_corpus_that_is_told():
    words = words_of(TOLD)
    assert words == {tuple("low_"): 5, tuple("lowest_"): 2, tuple("newer_"): 3, tuple("wider_"): 4}
    assert symbols_of(words) == list("lowestnrid_")
    pairs = pair_counts(words)
    assert {pair for pair, count in pairs.items() if count == 7} == {("l", "o"), ("o", "w"), ("e", "r"), ("r", "_")}
    assert (pairs["w", "_"], pairs["w", "e"]) == (5, 5)
    assert max(pairs.values()) == 7


def test_A3_merges_as_told():
    found = [step for step, _ in zip(steps(words_of(TOLD)), range(4), strict=False)]
    assert [step.symbol for step in found] == ["lo", "er", "er_", "low"]
    assert [step.score for step in found] == [7, 7, 7, 7]
    assert found[0].tied == [("l", "o"), ("e", "r"), ("o", "w"), ("r", "_")]
    assert found[0].words == {("lo", "w", "_"): 5, ("lo", *"west_"): 2, tuple("newer_"): 3, tuple("wider_"): 4}
    assert found[1].words == {("lo", "w", "_"): 5, ("lo", *"west_"): 2, (*"new", "er", "_"): 3, (*"wid", "er", "_"): 4}


def test_A3_ties_do_not_depend_on_the_order_of_words():
    draw = random.Random(3)
    expected = [step.pair for step in steps(words_of(TOLD))]
    for _ in range(20):
        words = TOLD.split()
        draw.shuffle(words)
        assert [step.pair for step in steps(words_of(" ".join(words)))] == expected


def test_A3_source_error_low_and_est_do_not_follow_from_the_merges_told():
    """000 cuts "lowest" into "low" + "est"; its four merges leave the end in letters."""
    merges = [step.pair for step, _ in zip(steps(words_of(TOLD)), range(4), strict=False)]
    assert encode_bpe(tuple("lowest_"), merges) == ("low", "e", "s", "t", "_")
    assert encode_bpe(tuple("low_"), merges) == ("low", "_")
    cuts = {encode_bpe(tuple("lowest_"), [s.pair for s in steps(words_of(TOLD))][:n]) for n in range(16)}
    assert ("low", "est") not in cuts  # what ends a word ends with the marker


def test_A5_the_score_that_is_told():
    assert wordpiece_score(100, 500, 200) == Fraction(1, 1000)
    assert round(float(wordpiece_score(50, 60, 300)), 5) == 0.00278
    words = {("e", "r"): 100, ("e",): 400, ("r",): 100, ("q", "u"): 50, ("q",): 10, ("u",): 250}
    assert next(steps(words, wordpiece)).pair == ("q", "u")
    assert next(steps(words, bpe)).pair == ("e", "r")


def test_A5_the_trainer_takes_the_pair_that_is_told():
    words, counts = ["er", "e", "r", "qu", "q", "u"], np.array([100, 400, 100, 50, 10, 250])
    pieces = learn_pieces(words, counts, list("eruq"), 10)
    assert pieces == [*"eruq", "##e", "##r", "##u", "##q", "qu", "er"]


def _corpus(draw: random.Random, letters: str, words: int) -> list[str]:
    return ["".join(draw.choices(letters, k=draw.randint(1, 7))) for _ in range(words)]


@pytest.mark.parametrize("seed", range(12))
def test_A3_A4_rustbpe_learns_the_references_merges(seed):
    """Up to ties: rustbpe's own rule is the pair of the bpe_by_age symbols, the bytes by value."""
    draw = random.Random(seed)
    corpus = _corpus(draw, "abcd", 60)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter([" ".join(corpus)]), 256 + 25, pattern=r"[a-z]+| ")
    tokens = [bytes(t).decode("latin-1") for t, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    words = words_of(" ".join(corpus), end="")
    reference = [
        step.symbol for step, _ in zip(steps(words, bpe_by_age, map(chr, range(256))), range(25), strict=False)
    ]
    assert tokens[256:] == reference[: len(tokens) - 256]
    merges = [step.pair for step, _ in zip(steps(words, bpe_by_age, map(chr, range(256))), range(25), strict=False)]
    ours = ByteBPE([t.encode("latin-1") for t in tokens], r"[a-z]+| ")
    for word in _corpus(draw, "abcd", 200):
        assert [tokens[id] for id in ours.encode(word)] == list(encode_bpe(tuple(word), merges))


@pytest.mark.parametrize("seed", range(8))
def test_A3_A6_the_librarys_bpe_learns_the_references_merges(seed, display):
    """Characters instead of bytes; its own tie rule is the pair of the oldest symbols, the alphabet in letter order."""
    draw = random.Random(100 + seed)
    corpus = _corpus(draw, "abcdé", 80)
    vocab = 256 + 6 + 20 + len(SPECIALS)
    made = trainers.sentencepiece_bpe(settings(type="sentencepiece-bpe", vocab=vocab), [" ".join(corpus)], display)
    words = {tuple(word): 0 for word in ["", *corpus]}
    for n, word in enumerate(corpus):
        words[tuple(word if n == 0 else " " + word)] = words.get(tuple(word if n == 0 else " " + word), 0) + 1
    words = {word: count for word, count in words.items() if count}
    found = steps(words, bpe_by_age, sorted({letter for word in words for letter in word}))
    merges = [step.pair for step, _ in zip(found, range(20), strict=False)]
    assert [tuple(pair) for pair in made.data["model"]["merges"]] == merges
    for word in _corpus(draw, "abcdé", 100):
        cut = [made.token_bytes(id).decode() for id in made.encode(word)]
        assert cut == list(encode_bpe(tuple(word), merges))


@pytest.mark.parametrize("seed", range(8))
def test_A3_the_end_of_word_trainer_learns_the_references_merges(seed, display):
    """The marker is part of a word's last symbol, as in subword-nmt; a tie goes to the oldest symbols."""
    draw = random.Random(300 + seed)
    corpus = _corpus(draw, "abcd", 80)
    vocab = 2 * 256 + 20 + len(SPECIALS)
    made = trainers.end_of_word_bpe(settings(type="end-of-word-bpe", vocab=vocab), [" ".join(corpus)], display)
    words: dict[tuple[str, ...], int] = {}
    for n, word in enumerate(corpus):
        *inner, last = word if n == 0 else "Ġ" + word
        words[*inner, last + "</w>"] = words.get((*inner, last + "</w>"), 0) + 1
    letters = [letter for _, letter in sorted(byte_letters().items())]
    found = steps(words, bpe_by_age, [*letters, *(letter + "</w>" for letter in letters)])
    merges = [step.pair for step, _ in zip(found, range(20), strict=False)]
    assert [tuple(pair) for pair in made.data["model"]["merges"]] == merges
    pieces = {id: piece for piece, id in made.data["model"]["vocab"].items()}
    for word in _corpus(draw, "abcd", 100):
        *inner, last = word
        assert [pieces[id] for id in made.encode(word).tolist()] == [*encode_bpe((*inner, last + "</w>"), merges)]


def test_A3_the_corpus_that_is_told_with_a_marker(display):
    """000's corpus, as a type that a model can be trained with: l and o meet first; words end in marked pieces."""
    given = settings(type="end-of-word-bpe", vocab=2 * 256 + 12 + len(SPECIALS))
    made = trainers.end_of_word_bpe(given, [TOLD], display)
    merges = [tuple(pair) for pair in made.data["model"]["merges"]]
    assert {("l", "o"), ("e", "r</w>")} <= set(merges)
    pieces = {id: piece for piece, id in made.data["model"]["vocab"].items()}
    for word in TOLD.split():
        ends = [pieces[id].endswith("</w>") for id in made.encode(" " + word).tolist()]
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("seed", range(12))
def test_A5_the_wordpiece_trainer_learns_the_references_pieces(seed):
    """Without the floor on counts (every pair is frequent enough) it is the reference, exactly."""
    draw = random.Random(200 + seed)
    words: dict[str, int] = {}
    for word in _corpus(draw, "abcd", 40):
        words[word] = words.get(word, 0) + draw.randint(1, 3)
    letters = list("abcd")
    marked = {tuple(c if n == 0 else "##" + c for n, c in enumerate(word)): count for word, count in words.items()}
    known = [*letters, *("##" + letter for letter in letters)]
    reference = _marked_steps(marked, known, 30)
    pieces = learn_pieces(list(words), np.array(list(words.values())), letters, len(reference), min_count=1)
    assert pieces == reference


def _marked_steps(words: dict[tuple[str, ...], int], known: list[str], most: int) -> list[str]:
    """The reference on marked pieces: a joined piece has one mark, so symbols are joined here and chosen there."""
    known = list(known)
    while len(known) < most and (pairs := pair_counts(words)):
        left, right = wordpiece(words, pairs, known)[1][0]
        piece = left + right.removeprefix("##")
        after: dict[tuple[str, ...], int] = {}
        for word, count in words.items():
            joined: list[str] = []
            for symbol in word:
                if joined and (joined[-1], symbol) == (left, right):
                    joined[-1] = piece
                else:
                    joined.append(symbol)
            after[tuple(joined)] = after.get(tuple(joined), 0) + count
        words = after
        if piece not in known:
            known.append(piece)
    return known


def test_A5_wordpieces_are_cut_as_the_reference_cuts(display, log):
    tokenizer, _ = train(settings(type="wordpiece", vocab=900), labelled(SOURCES[3]), display, log)
    pieces = tokenizer.data["model"]["vocab"]
    letters = {piece: id for piece, id in pieces.items() if not piece.startswith("##")}
    names = {id: piece for piece, id in pieces.items()}
    assert letters
    for word in set(SOURCES[1].split()):
        if word.isascii() and word.isalpha():
            assert [names[id] for id in tokenizer.encode(word)] == encode_wordpiece(word, pieces)
    assert encode_wordpiece("aé", ["a"]) is None


def test_the_score_alone_spends_a_vocabulary_on_rare_letters(display):
    """Why pairs must be frequent enough: the same number of pieces, cut with and without the floor."""
    words, counts = trainers.count_words(SOURCES[:1], [{"type": "Whitespace"}], display)
    spelled = [(w, c) for w, c in zip(words, counts.tolist(), strict=True) if w.isascii() and len(w) < 40]
    letters = sorted({letter for word, _ in spelled for letter in word})
    size = 2 * len(letters) + 150

    def tokens(**floor: int) -> int:
        pieces = learn_pieces([w for w, _ in spelled], np.array([c for _, c in spelled]), letters, size, **floor)
        assert len(pieces) == size
        return sum(count * len(encode_wordpiece(word, pieces) or ()) for word, count in spelled)

    assert tokens() < 0.7 * tokens(min_count=1)
