"""What is done to a batch at once gives what the plain way gives, text by text."""

import hashlib
import re
import sys
import unicodedata

import polars as pl
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ingot.corpus import clean, dedup, filters, pii

BLANKS = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
PLAIN = st.text(st.sampled_from([*"ab.!-é字😀e\u0301\u212bﬁ\x00\x1b\x7f\x80\x85\x9f\ufeff'", *BLANKS]))
BATCHES = st.lists(PLAIN | st.text(), max_size=12)


def sliced(texts: list[str]) -> list[pl.Series]:
    """The texts as a column, and as a slice out of the middle of one."""
    longer = pl.Series("text", ["before ", *texts, " after"], dtype=pl.String)
    return [pl.Series("text", texts, dtype=pl.String), longer.slice(1, len(texts))]


@examples(max_examples=120, deadline=None)
@given(BATCHES)
def test_squeezed_texts_and_their_fingerprints(texts):
    expected = [" ".join(text.split()) for text in texts]
    for column in sliced(texts):
        squeezed = dedup.squeeze(column)
        squeezed.validate(full=True)
        assert squeezed.to_pylist() == expected
        digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in expected]
        assert dedup.fingerprints(squeezed) == digests


def plain_clean(text: str) -> str:
    """The rules of `clean`, written down once more with Python's own tools."""
    text = re.sub("\r\n|[\r\x0b\x0c\x85]", "\n", text)
    text = re.sub("[\x00-\x08\x0e-\x1f\x7f-\x9f]", "", text)
    text = text.lstrip("\ufeff")
    text = re.sub(r"[ \t]+\Z", "", text)
    return unicodedata.normalize("NFC", re.sub(r"\n[ \t\n]+\Z", "\n", text))


@examples(max_examples=120, deadline=None)
@given(st.lists(PLAIN, max_size=12))
def test_cleaned_texts(texts):
    for column in sliced(texts):
        assert clean.clean_texts(column).to_list() == [plain_clean(text) for text in texts]


def test_what_is_not_normalised_is_stable_in_any_company():
    """Every character that may pass unseen is its own NFC, has no class to be reordered by, and follows no other."""
    everything = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    unstable = pl.Series(everything).str.contains(clean._NEEDS_NFC)
    stable = [c for c, found in zip(everything, unstable, strict=True) if not found]
    assert len(stable) > 40_000
    column = pl.Series(stable)
    assert column.str.normalize("NFC").equals(column)
    parts = [unicodedata.decomposition(c).split() for c in everything]
    seconds = {
        chr(int(p[1], 16)) for p in parts if len(p) == 2 and not p[0].startswith("<")
    }  # "<super> 32" composes not
    assert "\u0301" in seconds
    seconds |= {chr(c) for c in range(0x1161, 0x1176)} | {chr(c) for c in range(0x11A8, 0x11C3)}
    assert not seconds & set(stable)
    assert not [c for c in stable if unicodedata.combining(c) or unicodedata.normalize("NFC", c) != c]


def plain_measures(text: str) -> tuple[int, int, float, float, float]:
    """Characters, words, mean length, signs and distinct words of a text with blanks between words."""
    words = [w for w in re.split(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+", text) if w]
    signs = pl.select(pl.lit(text).str.count_matches(r"[^\p{Alphabetic}\p{M}\p{N}\s]")).item()
    return len(text), len(words), len("".join(words)) / len(words), signs / len(text), len(set(words)) / len(words)


@examples(max_examples=150, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab1.!-éß😀e\u0301 \t\n\x85\xa0\u3000")), max_size=12))
def test_measures(texts):
    kept = [text for text in texts if text.split()]
    for column in sliced(kept):
        names = ["characters", "words", "mean_word_length", "special_fraction", "unique_word_fraction"]
        assert filters.measure(column.to_frame()).select(names).rows() == [plain_measures(text) for text in kept]


ADDRESS = st.lists(st.text(st.sampled_from("0123456789abcdefF:"), max_size=6), max_size=9).map(":".join)
MAIL = st.text(st.sampled_from("ab1._+-@ é\n"), max_size=12)


@examples(max_examples=120, deadline=None)
@given(st.lists(st.lists(ADDRESS | MAIL, max_size=4).map(" ".join), max_size=8))
def test_hints_of_personal_data_miss_nothing(texts):
    column = pl.Series("text", texts, dtype=pl.String)
    for pattern, hints in ((pii._IPV6_PREFILTER, pii._HINTS["ip6"]), (pii._PREFILTERS["email"], pii._HINTS["email"])):
        expected = column.str.contains(pattern).arg_true().to_list()
        assert pii._matching_rows(column, pattern, hints).to_list() == expected
    mails = column.str.contains(pii._EMAIL)
    assert not (mails & ~column.str.contains(pii._PREFILTERS["email"])).any()
