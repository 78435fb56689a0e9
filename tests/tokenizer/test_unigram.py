"""Scores of a Unigram vocabulary against every segmentation written out."""

import itertools
import math

import numpy as np
import pytest

from ingot.tokenizer import unigram
from ingot.tokenizer.hf_tokenizers import HFTokenizer

PIECES = ["a", "b", "c", "ab", "bc", "abc", "aa", "ba"]
WORDS, COUNTS = ["abc", "aab", "abcab", "c", "baab"], np.array([5, 3, 2, 1, 4])


def segmentations(word: str) -> list[list[str]]:
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(word)), n) for n in range(len(word)))
    found = ([word[a:b] for a, b in itertools.pairwise((0, *cut, len(word)))] for cut in cuts)
    return [pieces for pieces in found if all(piece in PIECES for piece in pieces)]


def expected(logp: dict[str, float]) -> dict[str, float]:
    """How often each piece is used, weighting every segmentation by its probability."""
    total = dict.fromkeys(PIECES, 0.0)
    for word, count in zip(WORDS, COUNTS.tolist(), strict=True):
        ways = segmentations(word)
        weights = [math.exp(sum(logp[piece] for piece in way)) for way in ways]
        for way, weight in zip(ways, weights, strict=True):
            for piece in way:
                total[piece] += count * weight / sum(weights)
    return total


def likelihood(logp: dict[str, float]) -> float:
    ways = {word: segmentations(word) for word in WORDS}
    words = {word: math.log(sum(math.exp(sum(logp[p] for p in way)) for way in found)) for word, found in ways.items()}
    return sum(count * words[word] for word, count in zip(WORDS, COUNTS.tolist(), strict=True))


def lattices(words: list[str], counts: np.ndarray) -> list[unigram.Lattice]:
    return list(unigram._lattices(words, counts, {piece: n for n, piece in enumerate(PIECES)}))


@pytest.fixture
def logp() -> np.ndarray:
    return np.log(np.random.default_rng(1).dirichlet(np.ones(len(PIECES))))


def test_A6_unigram_expects_what_all_segmentations_expect(logp, monkeypatch):
    wanted = expected(dict(zip(PIECES, logp.tolist(), strict=True)))
    np.testing.assert_allclose(unigram.expected_uses(lattices(WORDS, COUNTS), logp), list(wanted.values()), rtol=1e-12)
    monkeypatch.setattr(unigram, "_CHUNK_CELLS", 30)  # words are worked on in parts
    np.testing.assert_allclose(unigram.expected_uses(lattices(WORDS, COUNTS), logp), list(wanted.values()), rtol=1e-12)


def test_A6_unigram_pieces_that_were_dropped_are_not_used(logp):
    kept = np.array([piece not in ("ab", "aa") for piece in PIECES])
    total = unigram.expected_uses(lattices(WORDS, COUNTS), unigram.log_probabilities(np.exp(logp), kept))
    assert (total[kept] > 0).all()
    assert (total[~kept] == 0).all()


def test_A6_unigram_second_best_is_the_likeliest_spelling_by_others(logp):
    known = dict(zip(PIECES, logp.tolist(), strict=True))
    found = unigram.best_alternative(lattices(PIECES, np.arange(len(PIECES))), logp)
    for piece, second in zip(PIECES, found.tolist(), strict=True):
        others = [sum(known[p] for p in way) for way in segmentations(piece) if way != [piece]]
        assert second == pytest.approx(max(others, default=-math.inf), abs=1e-12)


def test_A6_unigram_every_round_makes_the_words_likelier():
    total, kept = np.ones(len(PIECES)), np.ones(len(PIECES), dtype=bool)
    found = []
    for _ in range(4):
        logp = unigram.log_probabilities(total, kept)
        found.append(likelihood(dict(zip(PIECES, logp.tolist(), strict=True))))
        total = unigram.expected_uses(lattices(WORDS, COUNTS), logp)
    assert found == sorted(found)
    assert found[-1] > found[0] + 1


def test_A6_unigram_seeds_count_in_the_text_not_in_the_list_of_words():
    words, counts = ["=>", "==", "zqzqzq"], np.array([1000, 1, 1])
    assert unigram.seed_pieces(words, counts, list("=>zq"), 5) == [*"=>zq", "=>"]
    assert unigram.seed_pieces(words, counts, list("=>zq"), 99)[:6] == [*"=>zq", "=>", "zqzq"]


def test_A6_unigram_learns_the_words_that_a_text_is_made_of():
    """A language of four words, written without spaces: they are what is left, and the letters."""
    draw = np.random.default_rng(0)
    lexicon = ["abra", "cada", "bri", "dob"]
    words = ["".join(draw.choice(lexicon, size=draw.integers(1, 5))) for _ in range(400)]
    distinct = sorted(set(words))
    counts = np.array([words.count(word) for word in distinct])
    letters = sorted(set("".join(words)))
    passes: list[int] = []
    pieces, logp = unigram.learn(distinct, counts, letters, len(letters) + 4, lambda: passes.append(1))
    assert 1 < len(passes) <= unigram.MAX_PASSES
    assert {piece for piece in pieces if len(piece) > 1} == set(lexicon)
    assert set(pieces[:4]) == set(lexicon)
    assert np.exp(logp).sum() == pytest.approx(1)


def test_A6_unigram_a_word_is_cut_into_its_likeliest_pieces(logp):
    logp = dict(zip(PIECES, logp.tolist(), strict=True))
    vocab = [["<0x00>", -50.0], *([piece, score] for piece, score in logp.items())]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    tokenizer = HFTokenizer("unigram", {"version": "1.0", "model": model})
    for word in [*WORDS, "abcabcaab", "cba"]:
        best = max(segmentations(word), key=lambda way: sum(logp[piece] for piece in way))
        cut = [vocab[id][0] for id in tokenizer.encode(word)]
        assert sum(logp[piece] for piece in cut) == pytest.approx(sum(logp[piece] for piece in best), abs=1e-9)
