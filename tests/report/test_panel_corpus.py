"""The panel of a corpus: clusters with their differences, items of evaluations, languages; text never becomes HTML."""

import json
from pathlib import Path

from ingot.core.events import stable
from ingot.report import reading
from ingot.report.html.panels import corpus, marked_differences
from ingot.report.html.panels_corpus import cost
from tests.corpus.corpus_helpers import jsonl, make
from tests.corpus.test_near_duplicates import changed, prose


def test_words_that_differ_are_marked_and_escaped():
    kept, dropped = marked_differences("one <b>two</b> three & four", "one two three & <i>five</i>")
    assert kept == "one <mark>&lt;b&gt;two&lt;/b&gt;</mark> three &amp; <mark>four</mark>"
    assert dropped == "one <mark>two</mark> three &amp; <mark>&lt;i&gt;five&lt;/i&gt;</mark>"
    assert marked_differences("same", "same") == ("same", "same")


def test_B3_the_panel_shows_clusters_and_contaminated_documents(tmp_path: Path):
    script = "<script>alert(1)</script>"
    texts = [
        prose(100, 1),
        changed(prose(100, 1), 0.02, 5) + script,
        prose(100, 1) + " more",
        prose(100, 2),
        prose(80, 3),
    ]
    tests = jsonl(tmp_path / "tests.jsonl", [{"prompt": " ".join(prose(80, 3).split()[:20])}])
    stage = tmp_path / "stage"
    source = jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    result = make(stage, source, dedup={"minhash": {}}, decontaminate=[str(tests)])
    (stage / "result.json").write_text(json.dumps(result))
    near = reading.near_duplicates(stage)
    assert (near["documents"], near["clusters"]) == (2, 1)
    assert near["largest"] == [{"path": str(source), "offset": 0, "documents": 3}]
    assert [pair["similarity"] for pair in near["pairs"]] == sorted(pair["similarity"] for pair in near["pairs"])
    html = corpus(stage)
    assert "<mark>" in html
    assert script not in html
    assert f"{tests}: line 1" in html
    assert [step for step, _, _ in cost(stage)] == ["clean", "language", "evaluations", "signatures"]
    (event,) = reading.events(stage, "cost")
    assert stable(event) == {"event": "cost", "step": 1}, "seconds differ between runs of one recipe"


def test_a_corpus_without_clusters_has_no_such_part(tmp_path: Path):
    make(tmp_path, jsonl(tmp_path / "in.jsonl", [{"text": prose(20, 1)}]))
    assert reading.near_duplicates(tmp_path) == {}
    assert reading.contamination(tmp_path) == []
    assert "near-duplicate" not in corpus(tmp_path).lower()
