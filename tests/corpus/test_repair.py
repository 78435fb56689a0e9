"""SPEC row B4: characters that were decoded wrongly are repaired, and lines around the content removed, and counted."""

import importlib.util
import json
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from ingot.core.errors import UserError
from ingot.core.file_hashes import FileHashes
from ingot.corpus.readers.locate import source_digest
from ingot.corpus.repair import LINES, remove_boilerplate, repair_unicode
from tests.corpus.corpus_helpers import funnel, jsonl, make, settings

GOOD = [
    "Das Café ist schön, naïve Gäste: 5 € für l’été à Paris",
    "привет, мир",
    "Łódź and Åse",
    "日本語のテキスト",
    "“quotes” – dash…",
    "ação NÃO É Â fim",
    "Ελληνικά",
    "🎉 x² ½",
]
BOILERPLATE = [
    "This site uses cookies to improve your experience.",
    "We use cookies to personalise content and to analyse our traffic. ",
    "By continuing to browse our website you agree to the use of cookies.",
    "Accept all cookies",
    "  Share on Facebook",
    "Click to share on X (Opens in new window)",
    "Tweet this on Twitter",
    "Share this article:",
    "Home | About Us | Contact | Log in",
    "» Home > News > Archive",
    "* Skip to main content",
    "Back to top",
    "Read more »",
    "12 comments",
    "Leave a reply",
    "Subscribe to our newsletter!",
    "ADVERTISEMENT",
    "Please enable JavaScript to view the comments powered by Disqus.",
    "JavaScript must be enabled in your browser.",
    "Copyright © 2019 Example Inc. All rights reserved.",
    "Powered by WordPress.",
]
PROSE = [
    "We use cookies in the bakery every day.",
    "He asked why this site uses cookies.",
    "Share your thoughts on the forum.",
    "Read more, and the world is yours.",
    "Home is where the heart is.",
    "He went home - and then to the shop.",
    "About 20 comments were made.",
    "The copyright of this is his. All rights reserved for him.",
    "- Home",
    "Next",
    "Advertisements are everywhere in the city.",
    "I turned on JavaScript.",
]


def wrongly(text: str, encoding: str) -> str:
    return text.encode().decode(encoding)


@pytest.fixture
def ftfy() -> None:
    pytest.importorskip("ftfy")


@pytest.mark.parametrize("encoding", ["latin-1", "sloppy-windows-1252", "macroman", "cp437"])
@pytest.mark.usefixtures("ftfy")
def test_what_is_repaired_is_what_was_meant_and_can_be_undone(encoding: str) -> None:
    import ftfy.bad_codecs  # noqa: F401

    for meant in GOOD:
        (found,), (count,) = repair_unicode(pl.Series([wrongly(meant, encoding)]))
        assert (found, count) in ((meant, 1), (wrongly(meant, encoding), 0)), "repaired, or left alone"
    (found,), (count,) = repair_unicode(pl.Series([wrongly(GOOD[0], encoding)]))
    assert (found, count) == (GOOD[0], 1)


@pytest.mark.usefixtures("ftfy")
def test_only_the_lines_that_are_wrong_change() -> None:
    twice = wrongly(wrongly("Größe", "latin-1"), "latin-1")
    mixed = "“right” and cafÃ©"  # no encoding has the bytes of both
    text = "\n".join([GOOD[0], wrongly("café", "latin-1"), "plain", twice, mixed, *GOOD])
    (found, untouched), counts = repair_unicode(pl.Series([text, "\n".join(GOOD)]))
    assert found == "\n".join([GOOD[0], "café", "plain", "Größe", mixed, *GOOD])
    assert (untouched, counts.to_list()) == ("\n".join(GOOD), [2, 0])


def test_each_kind_of_boilerplate_goes_and_sentences_stay() -> None:
    mixed = "\n".join(line for pair in zip(PROSE, BOILERPLATE, strict=False) for line in pair)
    (one, two, three), counts = remove_boilerplate(pl.Series(["\n".join(BOILERPLATE), "\n".join(PROSE), mixed]))
    assert (one, two, three.rstrip("\n")) == ("", "\n".join(PROSE), "\n".join(PROSE))
    assert counts.to_list() == [len(BOILERPLATE), 0, len(PROSE)]
    for name, pattern in LINES.items():
        assert any(
            pl.Series([line.strip(" *».:!").lower()]).str.contains(f"^(?:{pattern})$")[0] for line in BOILERPLATE
        ), f"no line is of kind {name}"


@pytest.mark.usefixtures("ftfy")
def test_the_funnel_counts_lines_and_code_is_not_touched(tmp_path: Path) -> None:
    page = "Wir trinken cafÃ© hier.\nShare on Facebook\nSchluss.\nBack to top\n"
    for name in ("page.txt", "code.py"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(page)
    table = {"repair_unicode": True, "boilerplate": "drop"}
    make(tmp_path / "out", tmp_path / "in", **table)
    (file,) = (tmp_path / "out").glob("documents-*.parquet")
    rows = {Path(row["path"]).name: row for row in pq.read_table(file).to_pylist()}
    assert rows["page.txt"]["text"] == "Wir trinken café hier.\nSchluss.\n"
    assert rows["page.txt"]["bytes"] == len(rows["page.txt"]["text"].encode())
    assert rows["code.py"]["text"] == page
    assert funnel(tmp_path / "out")["lines"] == {"repaired_lines": 1, "boilerplate_lines": 2}
    (tmp_path / "long.txt").write_text(page * 9)
    make(tmp_path / "code", tmp_path / "long.txt", quality="code", **table)
    assert funnel(tmp_path / "code")["lines"] == {"repaired_lines": 0, "boilerplate_lines": 0}
    make(tmp_path / "off", tmp_path / "in")
    assert "lines" not in funnel(tmp_path / "off")


@pytest.mark.usefixtures("ftfy")
def test_messages_are_repaired_one_by_one(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "cafÃ©?"}, {"role": "assistant", "content": "Ja.\nRead more"}]
    source = jsonl(tmp_path / "talk.jsonl", [{"messages": messages}, {"messages": [*messages, *messages]}])
    make(tmp_path / "out", source, format="chat", repair_unicode=True, boilerplate="drop")
    (file,) = (tmp_path / "out").glob("documents-*.parquet")
    first = json.loads(pq.read_table(file)["text"][0].as_py())
    assert [message["content"] for message in first] == ["café?", "Ja.\n"]
    assert funnel(tmp_path / "out")["lines"] == {"repaired_lines": 3, "boilerplate_lines": 3}


@pytest.mark.parametrize(
    ("table", "package"), [({"repair_unicode": True}, "ftfy"), ({"html": "trafilatura"}, "trafilatura")]
)
def test_a_missing_package_is_one_sentence(
    table: dict[str, object], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    found = rf"{next(iter(table))}: found no package {package}, expected it; pip install 'ingot\[corpus\]'"
    with pytest.raises(UserError, match=found):
        source_digest(settings(tmp_path / "a.txt", **table), FileHashes(tmp_path / "memo.json"))
    with pytest.raises(UserError, match=found):
        make(tmp_path / "out", tmp_path / "a.txt", **table)
