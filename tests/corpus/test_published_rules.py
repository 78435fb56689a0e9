"""Gopher's, C4's and FineWeb's rules: each drops for its own reason, and measures what a plain implementation does."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ingot.corpus import pieces
from ingot.corpus.documents import iter_texts
from ingot.corpus.filters import load_filters
from ingot.corpus.measures import in_chunks, repetition, web_lines
from ingot.corpus.published_rules import RULE_SETS, RuleSets
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.tokens import tokens
from tests.corpus.corpus_helpers import funnel, jsonl, make

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
]


def prose(sentences: int, seed: int = 0) -> str:
    """Sentences of English with stop words, four a line."""
    draw = random.Random(seed)
    made = [
        " ".join(["The", *draw.sample(WORDS, 4), "of", "that", *draw.sample(WORDS, 3), f"{draw.randrange(10**6):b}a."])
        for _ in range(sentences)
    ]
    return "\n".join(" ".join(made[i : i + 4]) for i in range(0, sentences, 4))


def cut(text: str) -> list[str]:
    data, starts = flatten(pl.Series([text]))
    found = tokens(data, starts).pieces
    return [bytes(data[a:b]).decode() for a, b in zip(found.heads, found.ends, strict=True)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(state-of-the-art), he said...", "( state - of - the - art ) , he said ..."),
        ("don't it's we've “quoted” — he’ll", "do n't it 's we 've “ quoted ” — he ’ll"),
        ("x=1 a=b a/b 3+4 foo(bar) self.x ==== ----", "x=1 a = b a / b 3 + 4 foo(bar ) self.x = = = = ----"),
        ("U.S. end. IRQ. A. 3.5 word.Next", "U.S. end . IRQ . A. 3.5 word . Next"),
        ("see http://x.org/y-z?a=b, 64-bit [`foo`]: 🚨🚨", "see http://x.org/y-z?a=b , 64 - bit [ ` foo ` ] : 🚨 🚨"),
        ("a....b ... 0.00..5.04", "a .... b ... 0.00 .. 5.04"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_B2_tokens_are_cut_like_an_english_tokenizer_does(text: str, expected: str):
    assert cut(text) == expected.split()


def test_B2_tokens_do_not_depend_on_the_texts_around():
    texts = [prose(3, seed) + extra for seed in range(5) for extra in ("", ".", "...", "'s", "-", "“", "🚨", " (")]
    texts += ["x-", "y", "A.", ".b", "it'", "s", "a:", "//b-c", "1+", "2", "AB", ".", "", "...", "..", "x"]
    data, starts = flatten(pl.Series(texts))
    found = tokens(data, starts).pieces
    assert found.counts.tolist() == [len(cut(text)) for text in texts]
    words = [bytes(data[a:b]).decode() for a, b in zip(found.heads, found.ends, strict=True)]
    assert words == [word for text in texts for word in cut(text)]


# -- plain implementations ---------------------------------------------------------------------------------------------


def repeated(items: list[str]) -> tuple[int, int]:
    """Items that occurred before, and their characters."""
    again = [item for i, item in enumerate(items) if item in items[:i]]
    return len(again), sum(map(len, again))


def top(words: list[str], length: int) -> int:
    grams = [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]
    if not grams:
        return 0
    gram, number = Counter(grams).most_common(1)[0]
    return len(gram) * number


def overlap(words: list[str], length: int) -> int:
    seen: set[tuple[str, ...]] = set()
    at = characters = 0
    while at <= len(words) - length:
        run = tuple(words[at : at + length])
        characters += len("".join(run)) if run in seen else 0
        at += length if run in seen else 1
        seen.add(run)
    return characters


def test_B2_repetition_is_what_a_plain_implementation_counts():
    """On texts of few words, which repeat in every way; fractions that decide nothing are bounds from above."""
    draw = random.Random(5)
    texts = []
    for vocabulary in (2, 4, 9, 30):
        for number in (1, 3, 12, 60, 400):
            words = [draw.choice(WORDS[:vocabulary]) for _ in range(number)]
            texts.append("".join(w + draw.choice([" ", " ", " ", "\n", "\n\n", ", "]) for w in words).strip())
    (chunk,) = in_chunks(pl.Series(texts))
    found = repetition(chunk)
    for i, text in enumerate(texts):
        words = cut(text)
        lines = [line for line in text.split("\n") if line]
        paragraphs = [p.strip("\n") for p in text.split("\n\n") if p.strip("\n")]
        expected = {
            "repeated_lines": repeated(lines)[0] / len(lines),
            "repeated_line_characters": repeated(lines)[1] / len(text),
            "repeated_paragraphs": repeated(paragraphs)[0] / len(paragraphs),
            "repeated_paragraph_characters": repeated(paragraphs)[1] / len(text),
            **{f"top_{n}_words": top(words, n) / len(text) for n in (2, 3, 4)},
        }
        for name, value in expected.items():
            assert found[name][i] == pytest.approx(value), (name, text[:80])
        broken = False
        for n, bound in zip(range(5, 11), (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), strict=True):
            exact, measured = overlap(words, n) / len(text), found[f"repeated_{n}_words"][i]
            assert measured == pytest.approx(exact) or (exact <= measured and (broken or measured <= bound))
            broken |= measured > bound


def test_B2_lines_are_what_a_plain_implementation_counts():
    draw = random.Random(6)
    texts = [
        "\n".join(
            draw.choice(["Yes.", "no end", "", " ", "完了。", "A much longer line than thirty characters?", "x" * 30])
            for _ in range(n)
        )
        for n in range(1, 40)
    ]
    (chunk,) = in_chunks(pl.Series(texts))
    found = web_lines(chunk)
    for i, text in enumerate(texts):
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            continue
        again = repeated(lines)[1]
        assert found["lines_with_an_end"][i] == pytest.approx(sum(x[-1] in ".?。" for x in lines) / len(lines))
        assert found["short_lines"][i] == pytest.approx(sum(len(line) <= 30 for line in lines) / len(lines))
        assert found["repeated_characters"][i] == pytest.approx(again / len(text.replace("\n", "")))
        assert found["lines_per_word"][i] == pytest.approx(text.count("\n") / len(cut(text)))


# -- reasons -----------------------------------------------------------------------------------------------------------

LINE = "The way of the world is that people have time and a child is with family {}."
BREAKS: dict[str, Callable[[], str]] = {
    "gopher_few_words": lambda: prose(3),
    "gopher_many_words": lambda: " ".join(["the of and time"] * 25_001),
    "gopher_short_words": lambda: "to be of a I " * 20,
    "gopher_long_words": lambda: "the of and " + "incomprehensibilities characteristically " * 30,
    "gopher_hashes": lambda: prose(20).replace(" of ", " # # of "),
    "gopher_ellipses": lambda: prose(20).replace(" of ", " ... of ").replace(" that ", " ... that "),
    "gopher_bullet_lines": lambda: "\n".join(f"- the time of people and {w}" for w in WORDS),
    "gopher_ellipsis_lines": lambda: "\n".join(f"the time of people and that {w} with a long way..." for w in WORDS),
    "gopher_words_without_letters": lambda: prose(20).replace(" of ", " 123 of 456 ").replace(" that ", " 7 8 9 that "),
    "gopher_few_stop_words": lambda: " ".join(WORDS * 5),
    "gopher_repeated_paragraphs": lambda: "\n\n".join([*(f"{i} {w}" for i, w in enumerate(WORDS)), *["a b"] * 12]),
    "gopher_repeated_paragraph_characters": lambda: "\n\n".join(
        [*(w[:1] + str(i) for i, w in enumerate(WORDS)), *[prose(4)] * 2]
    ),
    "gopher_repeated_lines": lambda: prose(20) + "\nso" * 12,
    "gopher_repeated_line_characters": lambda: "\n".join(
        [*(w[:1] + str(i) for i, w in enumerate(WORDS)), *[prose(4)] * 2]
    ),
    "gopher_top_2_words": lambda: " ".join(f"incredibly important {w} {i}" for i, w in enumerate(WORDS)),
    "gopher_top_3_words": lambda: " ".join(f"one two six {prose(1, i)[:40]}" for i in range(17)).replace("The ", ""),
    "gopher_top_4_words": lambda: " ".join(f"a bc de fg {prose(1, i)[4:40]}" for i in range(17)),
    "gopher_repeated_5_words": lambda: " ".join(
        f"one of these five things {i}x {i}y {i}z {i}v {i}w {i}u" for i in range(30)
    ),
    "c4_lorem_ipsum": lambda: prose(20) + "\nHere is lorem ipsum dolor sit.",
    "c4_brackets": lambda: prose(20) + "\nThen f(x) { return the time. } and the end.",
    "c4_few_sentences": lambda: "\n".join(f"the time of people and {w}" for w in WORDS),
    "fineweb_lines_without_end": lambda: prose(20).replace(".", ""),
    "fineweb_short_lines": lambda: "\n".join(f"A short line of {i}." for i in range(40)),
    "fineweb_repeated_characters": lambda: prose(40) + "\n" + prose(40).split("\n")[0],
    "fineweb_lines_per_word": lambda: "\n\n\n\n\n\n\n\n\n\n".join(LINE.format(i) for i in range(20)),
}


def documents(texts: list[str]) -> pl.DataFrame:
    columns = {"text": texts, "path": ["page"] * len(texts), "language": ["en"] * len(texts)}
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def first_reason(text: str, names: list[str]) -> str | None:
    return reasons(RuleSets([RULE_SETS[name] for name in names]), [text])[0]


def reasons(sets: RuleSets, texts: list[str]) -> list[str | None]:
    """The first rule that each text breaks."""
    measures = sets.measures(documents(texts))
    broken = {reason: rule.broken(measures[rule.measure]) for reason, rule in sets.rules.items()}
    return [next((reason for reason, mask in broken.items() if mask[n]), None) for n in range(len(texts))]


@pytest.mark.parametrize("reason", BREAKS)
def test_B2_every_rule_drops_for_its_reason(reason: str):
    (owner,) = (name for name, one in RULE_SETS.items() if reason in one.rules)
    (chunk,) = in_chunks(pl.Series([BREAKS[reason]()]))
    rule = RULE_SETS[owner].rules[reason]
    assert rule.broken(RULE_SETS[owner].measure(chunk)[rule.measure])[0]
    assert first_reason(prose(60), [owner]) is None, "ordinary prose breaks no rule"


def test_B2_every_rule_has_an_example_or_is_of_a_family_that_has():
    rules = {reason for one in RULE_SETS.values() for reason in one.rules}
    assert rules - set(BREAKS) == {f"gopher_repeated_{n}_words" for n in range(6, 11)}


def test_B2_sets_are_named_in_a_recipe_and_counted_by_reason(tmp_path: Path):
    texts = [prose(60), prose(3), BREAKS["fineweb_short_lines"](), BREAKS["c4_brackets"](), prose(60, 1)]
    out = tmp_path / "out"
    filters = ["gopher_quality", "lorem_ipsum", "c4", "fineweb"]
    make(out, jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts]), filters=filters)
    assert list(iter_texts(out)) == [texts[0], texts[4]]
    assert {r: n["documents"] for r, n in funnel(out)["dropped"].items()} == {
        "gopher_few_words": 1,
        "gopher_short_words": 1,
        "c4_brackets": 1,
    }
    assert list(load_filters(filters)) == ["gopher_quality", "lorem_ipsum", "c4, fineweb"]


def test_B2_reasons_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch):
    texts = [make_text() for make_text in BREAKS.values()] + [prose(n, n) for n in range(1, 60)] + [""]
    every = RuleSets(list(RULE_SETS.values()))
    whole = reasons(every, texts)
    monkeypatch.setattr("ingot.corpus.measures.chunks", lambda data, starts: pieces.chunks(data, starts, 1000))
    assert reasons(every, texts) == whole
    assert reasons(every, []) == []
    alone = [reasons(every, [text])[0] for text in texts]
    assert alone == whole
    assert len(set(whole)) > 10


def test_hashes_of_a_long_text_need_no_table(monkeypatch: pytest.MonkeyPatch):
    data, starts = flatten(pl.Series([prose(40), prose(40)]))
    words = pieces.split(data != 0x20, starts)
    expected = pieces.hashes(data, words)
    monkeypatch.setattr(pieces, "_POWERS", pieces._POWERS[:10])
    np.testing.assert_array_equal(pieces.hashes(data, words), expected)
