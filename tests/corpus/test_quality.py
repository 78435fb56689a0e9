"""SPEC B2: quality bounds, each of them a setting; cleaning before it; filters of one function."""

import random
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.core.settings import canonical
from ingot.corpus.clean import clean_texts
from ingot.corpus.documents import iter_texts
from ingot.corpus.filters import measure, quality_measures, quality_rules
from ingot.corpus.settings import CODE, TEXT, CorpusSettings, QualityBounds
from tests.corpus.corpus_helpers import funnel, jsonl, make

WORDS = [f"word{a}{b}" for a in "abcdefghijklmnop" for b in "abcdefghijklmnopqrstuvwxyz"]


def reason(text: str, bounds: QualityBounds = TEXT) -> str | None:
    measures = quality_measures(measure(pl.DataFrame({"text": [text]})))
    return next((r for r, rule in quality_rules(bounds).items() if rule.broken(measures[rule.measure])[0]), None)


def test_B2_bounds_are_inclusive_at_128_and_4096_words():
    many = (WORDS * 12)[:4097]
    assert [reason(" ".join(many[:n])) for n in (127, 128, 416)] == ["too_few_words", None, None]
    loose = TEXT.model_copy(update={"min_unique_fraction": 0.0})
    assert [reason(" ".join(many[:n]), loose) for n in (4096, 4097)] == [None, "too_many_words"]


def test_B2_mean_word_length_3_to_10():
    def text(length: int) -> str:
        return " ".join(f"{i:0{length}d}"[-length:] for i in range(100, 300))

    assert [reason(text(n)) for n in (3, 10, 11)] == [None, None, "words_too_long"]
    two = " ".join([a + b for a in "abcdefghijklmnop" for b in "abcdefghij"])
    assert reason(two) == "words_too_short"


def test_B2_special_share_and_unique_fraction():
    assert reason(" ".join(f"{w[-2:]}!!!!" for w in WORDS[:200])) == "too_many_special_characters"
    assert reason("the same five words again " * 40) == "too_repetitive"
    assert reason(" ".join(WORDS[:26] * 5)) is None  # exactly 0.2 of 130 words


def test_B2_every_bound_is_a_setting_and_in_the_key():
    base = CorpusSettings.model_validate({"sources": "x", "quality": {}})
    for name, value in QualityBounds().model_dump().items():
        other = CorpusSettings.model_validate(
            {"sources": "x", "quality": {name: value / 2 if value < 1 else value + 1}}
        )
        assert canonical(base) != canonical(other), name


def test_B2_source_code_keeps_to_its_own_bounds():
    code = "".join(f"def f_{i}(self, x):\n    return self.table[{i}] + x * {i}\n\n\n" for i in range(900))
    assert reason(code, CODE) is None
    assert reason(code, TEXT) == "too_many_words"


def test_B2_languages_without_spaces_are_not_rejected():
    """001 splits at white space: a page of Chinese is a few very long words to it."""
    chinese = "".join(chr(0x4E00 + (i * 37) % 900) for i in range(300)) + "。"
    thai = "".join(random.Random(1).choices([chr(c) for c in range(0x0E01, 0x0E2E)], k=400))
    row = measure(pl.DataFrame({"text": [chinese, thai]}))
    assert row["words"][0] == 300
    assert row["mean_word_length"].to_list() == [None, None]
    assert [reason(chinese), reason(thai)] == [None, None]
    assert reason("啊" * 300) == "too_repetitive"
    assert reason(chinese[:100]) == "too_few_words"


def test_B2_one_function_is_a_filter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def too_shouty(documents):\n    return documents['text'].str.contains('!!!')\n")
    source = jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": "WOW!!!"}, {"text": "Lorem ipsum dolor sit"}])
    make(tmp_path / "out", source, filters=["mine.py:too_shouty", "lorem_ipsum"])
    dropped = funnel(tmp_path / "out")["dropped"]
    assert {name: pair["documents"] for name, pair in dropped.items()} == {"lorem_ipsum": 1, "too_shouty": 1}


def test_B2_wrong_filters_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": "also"}])
    (tmp_path / "mine.py").write_text(
        "def scalar(documents):\n    return True\n\n\ndef raises(documents):\n    return documents['nothing']\n"
    )
    for name, sentence in {
        "lorem_ipsun": "did you mean 'lorem_ipsum'",
        "other.py:f": "no file other.py",
        "mine.py:scaler": "did you mean 'scalar'",
        "mine.py:scalar": "returned bool, expected a Boolean",
        "mine.py:raises": "'raises' raised ColumnNotFoundError: .* on the 2 documents from .*a.jsonl to .*; fix the",
    }.items():
        with pytest.raises(UserError, match=sentence):
            make(tmp_path / "out", source, filters=[name])


def test_clean_removes_what_carries_no_text():
    dirty = "\ufeffa\r\nb\rc\x00\x07d\u0065\u0301  \n\tindented\n\n\n"
    assert clean_texts(pl.Series([dirty]))[0] == "a\nb\ncdé  \n\tindented\n"
    given = pl.Series([dirty, "clean"])
    clean_texts(given)
    assert given.to_list() == [dirty, "clean"], "what was given is as it was"
    assert clean_texts(pl.Series([dirty]), trim_lines=True)[0] == "a\nb\ncdé\n\tindented\n"


@given(st.lists(st.text(alphabet=st.sampled_from("ab \t\n\r\x00\x0b\x0c\x7f\x85\ufeffe\u0301字")), min_size=1))
def test_clean_is_idempotent(texts):
    for trim in (False, True):
        once = clean_texts(pl.Series(texts), trim)
        assert clean_texts(once, trim).to_list() == once.to_list()


def test_clean_passes_clean_text_byte_for_byte(tmp_path):
    text = "First Citizen: \nBefore we proceed\n\n    any further, hear me speak.\n"
    (tmp_path / "a.txt").write_text(text)
    make(tmp_path / "out", tmp_path / "a.txt")
    assert list(iter_texts(tmp_path / "out")) == [text]


def test_B2_special_share_0_3_and_unique_share_0_2_are_the_bounds():
    def text(signs):  # 200 words of 10 characters, 2,200 characters in all
        extra = signs - 600
        return "".join(f"{i:03d}abcd"[: 7 - (i < extra)] + "!" * (3 + (i < extra)) + " " for i in range(200))

    assert [reason(text(n)) for n in (660, 661)] == [None, "too_many_special_characters"]
    words = [f"word{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    assert [reason(" ".join((words[:n] * 6)[:130])) for n in (26, 25)] == [None, "too_repetitive"]


def test_a_filter_of_the_user_sees_the_measures(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def long(documents):\n    return documents['words'] > 5\n")
    rows = jsonl(tmp_path / "in.jsonl", [{"text": "one two three four five six"}, {"text": "one two three"}])
    bounds = {"min_words": 1, "min_unique_fraction": 0}
    make(tmp_path / "out", rows, quality=bounds, filters=[f"{tmp_path}/mine.py:long"])
    assert list(iter_texts(tmp_path / "out")) == ["one two three"]
