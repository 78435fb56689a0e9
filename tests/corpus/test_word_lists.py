"""Lists of words: hits per 1,000 words, complete words, phrases, languages, and the reason of what is dropped."""

import json
from pathlib import Path

import polars as pl
import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.file_hashes import FileHashes
from ingot.corpus import word_lists
from ingot.corpus.readers.locate import source_digest
from ingot.corpus.settings import WordList
from ingot.corpus.word_lists import LISTS, load_word_lists
from tests.corpus.corpus_helpers import funnel, jsonl, make, settings


def _measure(path: Path, texts: list[str]) -> list[tuple[float, float]]:
    (found,) = load_word_lists({"own": WordList(path=str(path), min_hits=1)}, "text").values()
    hits, words = found.hits(pl.Series(texts))
    measure = found.measures(pl.DataFrame({"text": texts}))["words.own"]
    assert measure.tolist() == pytest.approx([1000 * h / max(n, 1) for h, n in zip(hits["own"], words, strict=True)])
    return list(zip(hits["own"].tolist(), measure.tolist(), strict=True))


def test_complete_words_and_phrases_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("# mine\n\nScrap\nbuy now\n色情\nÄrger\n")
    found = _measure(
        path,
        [
            "scrap, SCRAP! scrapped",  # 2 of 3 words
            "Buy now - buy  now; buy it now",  # 2 phrases in 7 words
            "这是色情内容",  # a script without blanks: every character is a word
            "ÄRGER ärger",
            "",
            "buy",
            "now buy",
        ],
    )
    assert [hits for hits, _ in found] == [2, 2, 1, 2, 0, 0, 0]
    assert found[0][1] == pytest.approx(2000 / 3)
    assert found[1][1] == pytest.approx(2000 / 7)
    assert found[2][1] == pytest.approx(1000 / 6)


def test_documents_with_many_hits_are_dropped_by_name(tmp_path: Path) -> None:
    filler = "a quiet text about gardens and rivers in spring " * 20
    rows = [filler, filler + "idiot", filler + "idiot moron " * 10, "Casino! Buy now, free spins. " + filler[:100]]
    rows += ["Der Idiot moron und der idiot sagten nichts, denn das Wetter war schlecht und der Weg nach Hause weit."]
    words = {"toxicity": {}, "spam": {"max_per_thousand": 50.0}}
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"{text} {n}"} for n, text in enumerate(rows)])
    make(tmp_path / "out", source, words=words)
    dropped = pl.read_parquet(tmp_path / "out" / "dropped.parquet")
    assert sorted(dropped["reason"]) == ["spam_words", "toxicity_words", "toxicity_words"]
    counts = funnel(tmp_path / "out")
    assert counts["in"]["documents"] == counts["kept"]["documents"] + 3 == len(rows)
    # with languages, a list of ours judges English alone
    make(tmp_path / "routed", source, words=words, languages=["en", "de"])
    assert sorted(pl.read_parquet(tmp_path / "routed" / "dropped.parquet")["reason"]) == [
        "spam_words",
        "toxicity_words",
    ]


def test_lists_share_the_words_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list finds what it would find alone, and is a rule with a histogram; texts are cut once."""
    for name, content in (("one", "red\nblue sky\n"), ("two", "blue\nred\ngreen grass field\n")):
        (tmp_path / f"{name}.txt").write_text(content)
    lists = {name: WordList(path=str(tmp_path / f"{name}.txt")) for name in ("one", "two")}
    texts = pl.DataFrame({"text": ["red blue sky, a green grass field", "", "blue blue sky", "red"]})
    calls, cut = [], word_lists.split_words
    (both,) = load_word_lists(lists, "text").values()
    monkeypatch.setattr(word_lists, "split_words", lambda *text: calls.append(1) or cut(*text))
    found = both.measures(texts)
    assert len(calls) == 1
    for name in lists:
        (alone,) = load_word_lists({name: lists[name]}, "text").values()
        assert found[f"words.{name}"].tolist() == alone.measures(texts)[f"words.{name}"].tolist()
    assert found["words.two"].tolist() == pytest.approx([3000 / 7, 0, 2000 / 3, 0])
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", texts.to_dicts()), words={"two": {"path": lists["two"].path}})
    rules = json.loads((tmp_path / "out" / "rules.json").read_text())
    assert rules["rules"]["two_words"]["removed"] == rules["rules"]["two_words"]["alone"] == 2
    assert sum(rules["measures"]["words.two"]["documents"]) == 3


def test_words_of_a_conversation_are_those_of_its_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi\nidiot"}, {"role": "assistant", "content": "You\nmoron"}]
    calm = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    source = jsonl(tmp_path / "a.jsonl", [{"messages": talk}, {"messages": calm}])
    make(tmp_path / "out", source, format="chat", words={"toxicity": {}})
    assert funnel(tmp_path / "out")["dropped"]["toxicity_words"]["documents"] == 1


@pytest.mark.slow
def test_lists_of_ours_do_not_drop_the_documentation_of_python(tmp_path: Path) -> None:
    make(tmp_path / "out", "python:docs", words={name: {} for name in LISTS})
    counts = funnel(tmp_path / "out")
    dropped = sum(n["documents"] for reason, n in counts["dropped"].items() if reason.endswith("_words"))
    assert dropped == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"toxicty": {}}, "no list 'toxicty' of ours; .*toxicity"),
        ({"own": {"path": "missing.txt"}}, "found no file missing.txt"),
        ({"own": {"path": "empty.txt"}}, "empty.txt has no entry"),
        ({"own": {"path": "signs.txt"}}, "the entry '!!!'"),
        ({"own": {"path": "latin.txt"}}, "not UTF-8"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(
    words: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "signs.txt").write_text("word\n!!!\n")
    (tmp_path / "latin.txt").write_bytes("Ärger".encode("latin-1"))
    lists = {name: WordList.model_validate(table) for name, table in words.items()}
    with pytest.raises(UserError, match=message):
        load_word_lists(lists, "text")


def test_a_list_for_a_language_that_is_not_kept_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"words.toxicity: found languages = \['en'\], expected some of \['de'\]"):
        settings("a", words={"toxicity": {}}, languages=["de"])


def test_a_changed_list_is_another_corpus(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    digests = set()
    for content in ("one", "two"):
        (tmp_path / "own.txt").write_text(content)
        table = settings(source, words={"own": {"path": str(tmp_path / "own.txt")}})
        digests.add(source_digest(table, FileHashes(tmp_path / f"{content}.json")))
    assert len(digests) == 2
