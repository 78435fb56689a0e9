"""Scores: what tells real text from noise on documents that were not trained on, and controls that do not."""

import hashlib
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ingot.core.errors import UserError
from ingot.corpus.readers.python_library import docs_texts, library_files
from ingot.corpus.scores import classifier, ngram
from ingot.corpus.scores.calibration import auc, calibration_error, log_loss, platt, sigmoid
from ingot.corpus.scores.features import features
from ingot.corpus.scores.scorer import Corpus, examples, load_scorer, save_scorer, train
from ingot.corpus.scores.settings import Measure
from tests.corpus.corpus_helpers import jsonl, make

MENU = ["Home", "About us", "Contact", "Login", "Register", "Privacy policy", "Terms of use", "Share", "Next", "Search"]


def shuffled(text: str, draw: random.Random) -> str:
    """Words in another order; the white space stays where it is."""
    parts = re.split(r"(\s+)", text)
    words = parts[::2]
    draw.shuffle(words)
    parts[::2] = words
    return "".join(parts)


def scrambled(text: str, draw: random.Random) -> str:
    return re.sub(r"\w+", lambda word: "".join(draw.sample(word[0], len(word[0]))), text)


def boilerplate(text: str, draw: random.Random) -> str:
    return "\n".join(" | ".join(draw.choices(MENU, k=6)) for _ in range(len(text.split()) // 6))


NOISE = {f.__name__: f for f in (shuffled, scrambled, boilerplate)}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = {text for group, file in library_files() for text, _ in docs_texts(file, group)}
    beginnings = {text[:3000] for text in found if len(text.split()) >= 100}
    return sorted(beginnings, key=lambda t: hashlib.md5(t.encode()).digest())


def _halves(texts: list[str], noise: str) -> tuple[pl.Series, pl.Series, np.ndarray, np.ndarray]:
    """Training and held-out documents, real ones first and then their noise, and which are real."""
    draw, cut = random.Random(1), len(texts) * 2 // 3
    sides = [part + [NOISE[noise](text, draw) for text in part] for part in (texts[:cut], texts[cut:])]
    real = [np.arange(len(side)) < len(side) // 2 for side in sides]
    return pl.Series(sides[0]), pl.Series(sides[1]), real[0], real[1]


@pytest.mark.parametrize("noise", NOISE)
def test_the_classifier_tells_real_text_from_noise(texts: list[str], noise: str) -> None:
    known, new, known_real, new_real = _halves(texts[:200], noise)
    for_calibration = np.arange(len(new)) % 2 == 0
    scorer = classifier.train(known, known_real, new.filter(pl.Series(for_calibration)), new_real[for_calibration])
    scores, real = scorer.scores(new.filter(pl.Series(~for_calibration))), new_real[~for_calibration]
    assert auc(scores, real) >= 0.95
    assert log_loss(scores, real) < 0.35
    assert calibration_error(scores, real) < 0.12


def test_labels_without_a_meaning_teach_the_classifier_nothing(texts: list[str]) -> None:
    labels = np.random.default_rng(1).random(len(texts)) < 0.5
    new = np.arange(len(texts)) % 2 == 0
    weights = classifier.fit(features(pl.Series(texts).filter(pl.Series(~new))), labels[~new])
    assert 0.35 < auc(features(pl.Series(texts).filter(pl.Series(new))).times(weights), labels[new]) < 0.65


@pytest.mark.parametrize(
    ("measure", "noise"),
    [("perplexity", "scrambled"), ("order", "shuffled"), ("order", "boilerplate")],
)
def test_counts_of_words_tell_real_text_from_noise(texts: list[str], measure: Measure, noise: str) -> None:
    """Each measure where it is strong. With so few examples, perplexity has an AUC of .8 on shuffled words and .94 on
    boilerplate, order one of .94 on scrambled words."""
    known, new, known_real, real = _halves(texts, noise)
    scorer = ngram.train(known.filter(pl.Series(known_real)), measure)
    assert auc(scorer.scores(new) if scorer.higher_is_better else -scorer.scores(new), real) >= 0.95


@pytest.mark.parametrize(("measure", "noise"), [("perplexity", "scrambled"), ("order", "shuffled")])
def test_counts_of_noise_do_not(texts: list[str], measure: Measure, noise: str) -> None:
    """The control: trained on the noise instead, the same measure misses the bound."""
    known, new, known_real, real = _halves(texts, noise)
    scorer = ngram.train(known.filter(pl.Series(~known_real)), measure)
    assert auc(scorer.scores(new) if scorer.higher_is_better else -scorer.scores(new), real) < 0.95


def _witten_bell(texts: list[list[str]], test: list[str], base: dict[str, float], length: int, least: int) -> float:
    """ln P of a text by the formula, word by word, in dictionaries: the oracle."""
    grams = [Counter(tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)) for n in range(1, length + 1)]
    grams[-1] = Counter({gram: count for gram, count in grams[-1].items() if count >= least})
    total = 0.0
    for i, word in enumerate(test):
        p = base[word]
        for n, counts in enumerate(grams, 1):
            if i < n - 1:
                break
            context = tuple(test[i - n + 1 : i])
            after = [count for gram, count in counts.items() if gram[:-1] == context]
            if after:
                p = (counts[(*context, word)] + len(after) * p) / (sum(after) + len(after))
        total += math.log(p)
    return total


def test_the_probability_of_a_text_is_that_of_the_formula() -> None:
    texts = ["the cat sat on the mat the cat sat", "a cat and the dog sat on the mat", "dogs and cats"]
    known = [text.split() for text in texts]
    spellings = [["^", *word, "$"] for word in dict.fromkeys(w for text in known for w in text)]
    new = ["the", "cat", "sat", "on", "a", "log"]

    def spelled(word: str) -> float:
        signs = ["^", *word, "$"]
        counts = [Counter(tuple(s[i : i + n]) for s in spellings for i in range(len(s) - n + 1)) for n in range(1, 6)]
        del counts[0][("^",)]
        total = 0.0
        for i in range(1, len(signs)):
            p = 1 / 257
            for n, grams in enumerate(counts, 1):
                if i < n - 1:
                    break
                after = [count for gram, count in grams.items() if gram[:-1] == tuple(signs[i - n + 1 : i])]
                if after:
                    gram = tuple(signs[i - n + 1 : i + 1])
                    p = (grams[gram] + len(after) * p) / (sum(after) + len(after))
            total += math.log(p)
        return total

    base = {word: math.exp(spelled(word)) for word in new}
    expected = {n: _witten_bell(known, new, base, n, 2 if n == 3 else 1) for n in (1, 3)}
    bytes_ = sum(len(word) + 1 for word in new)
    assert ngram.train(pl.Series(texts)).scores(pl.Series([" ".join(new)]))[0] == pytest.approx(
        -expected[3] / math.log(2) / bytes_, rel=1e-5
    )
    order = ngram.train(pl.Series(texts), "order").scores(pl.Series([" ".join(new)]))[0]
    assert order == pytest.approx((expected[3] - expected[1]) / math.log(2) / len(new), rel=1e-5)


@pytest.mark.parametrize("type", ["classifier", "ngram"])
def test_a_score_depends_on_its_document_alone(texts: list[str], type: str, tmp_path: Path) -> None:
    """Not on the batch, and it is the same from the file."""
    known, _, real, _ = _halves(texts[:60], "scrambled")
    scorer = classifier.train(known, real, known, real) if type == "classifier" else ngram.train(known)
    new = pl.Series(["", "...", *texts[60:90], "one two three", "猫が好き", "x"])
    together = scorer.scores(new)
    assert len(together) == len(new)
    alone = np.concatenate([scorer.scores(new[i : i + 1]) for i in range(len(new))])
    np.testing.assert_array_equal(together, alone)
    save_scorer(tmp_path / "scorer", type, scorer)
    np.testing.assert_array_equal(load_scorer(tmp_path / "scorer").scores(new), together)
    if type == "ngram":
        assert np.isnan(together[:2]).all()
        assert not np.isnan(together[2:]).any()


def test_a_damaged_scorer_is_named(tmp_path: Path) -> None:
    (tmp_path / "scorer").write_bytes(b"nothing")
    with pytest.raises(UserError, match="scorer that the stage wrote"):
        load_scorer(tmp_path / "scorer")


def test_auc_is_the_fraction_of_pairs_in_order() -> None:
    draw = np.random.default_rng(1)
    scores, good = draw.integers(0, 6, 60).astype(float), draw.random(60) < 0.4
    pairs = np.sign(scores[good][:, None] - scores[~good][None]) / 2 + 0.5
    assert auc(scores, good) == pytest.approx(pairs.mean())


def test_platt_finds_the_probability_that_scores_were_drawn_with() -> None:
    """Both sides equally frequent, whatever their numbers."""
    draw = np.random.default_rng(1)
    scores = draw.normal(size=40_000)
    good = draw.random(len(scores)) < sigmoid(2 * scores - 0.5)
    rare = np.flatnonzero(good)[::4]
    kept = np.sort(np.concatenate([rare, np.flatnonzero(~good)]))
    prior = math.log(good.mean() / (1 - good.mean()))
    found = platt(scores[kept], good[kept])
    assert found == pytest.approx((2, -0.5 - prior), abs=0.08)
    assert calibration_error(found(scores[kept]), good[kept]) < 0.02
    assert calibration_error(found(3 * scores[kept]), good[kept]) > 0.05  # the control: too sure of itself


def test_a_scorer_is_trained_from_corpora_and_measured_on_what_they_hold_out(texts: list[str], tmp_path: Path) -> None:
    draw = random.Random(3)
    jsonl(tmp_path / "good.jsonl", [{"text": text} for text in texts[:150]])
    jsonl(tmp_path / "bad.jsonl", [{"text": scrambled(text, draw)} for text in texts[:150]])
    for name in ("good", "bad"):
        make(tmp_path / name, tmp_path / f"{name}.jsonl", holdout={"fraction": 0.4})
    good, bad = (Corpus(tmp_path / name, "text") for name in ("good", "bad"))
    scorer, result = train("classifier", "perplexity", [good], [bad])
    assert result["auc"] >= 0.95
    assert result["good_mean"] > 0.7 > 0.3 > result["bad_mean"]
    held_out = {text for side in (good, bad) for text in examples([side], "val").texts}
    assert not held_out & {text for side in (good, bad) for text in examples([side], "train").texts}
    assert result["held_out_documents"] == sum(int((~examples([s], "val").halves).sum()) for s in (good, bad))
    again, _ = train("classifier", "perplexity", [good], [bad])
    np.testing.assert_array_equal(again.tensors()["weights"], scorer.tensors()["weights"])


def test_many_examples_are_sampled_by_their_hash(texts: list[str], tmp_path: Path) -> None:
    """So a sample does not depend on the order of documents; documents without enough held out are refused."""
    for name, order in (("a", texts[:60]), ("b", texts[:60][::-1])):
        make(tmp_path / name, jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in order]))
    samples = [examples([Corpus(tmp_path / name, "text")], "train", 100_000).texts for name in ("a", "b")]
    assert sorted(samples[0]) == sorted(samples[1])
    assert 0 < sum(map(len, samples[0])) <= 100_000
    with pytest.raises(UserError, match="good: found 0 held-out documents, expected 20"):
        train("ngram", "perplexity", [Corpus(tmp_path / "a", "text")], [])
