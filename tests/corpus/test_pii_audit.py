"""The audit sample: the item that was masked, with its context; opt-in; nothing by batches."""

import json
from pathlib import Path

import polars as pl
import pytest

from ingot.corpus.pii import mask_pii
from ingot.corpus.pii_audit import masked_places
from ingot.corpus.readers import read
from ingot.report.html.panels import corpus
from tests.corpus.corpus_helpers import jsonl, make

TEXT = "Write to anna@example.com or [EMAIL], or call +49 30 1234567; the server is 93.184.216.34. Bye, bob@example.org"


def test_places_have_what_was_masked():
    masked, _ = mask_pii(pl.Series([TEXT]))
    found = masked_places(TEXT, masked[0])
    assert found["email"] == (TEXT[:65], masked[0][: 9 + 7 + 40])
    assert "+49 30 1234567" in found["phone"][0]
    assert "[PHONE]" in found["phone"][1]
    assert "93.184.216.34" in found["ip"][0]
    only_last, _ = mask_pii(pl.Series(["[EMAIL] bob@example.org"]))
    assert masked_places("[EMAIL] bob@example.org", only_last[0])["email"][0] == "[EMAIL] bob@example.org"
    assert masked_places("no [EMAIL] here", "no [EMAIL] here") == {}


def test_the_file_is_opt_in_says_what_it_is_and_depends_on_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": f"Number {n}: write to user{n}@example.com today."} for n in range(30)]
    source, files = jsonl(tmp_path / "in.jsonl", rows), []
    for batch in (1000, 4):
        monkeypatch.setattr(read, "BATCH_DOCUMENTS", batch)
        make(tmp_path / str(batch), source, pii_audit=5, workers=1)
        files.append((tmp_path / str(batch) / "pii_audit.json").read_bytes())
    assert files[0] == files[1]
    data = json.loads(files[0])
    assert "contains personal data" in data["warning"]
    places = data["places"]["email"]
    assert len(places) == 5
    assert all("@example.com" in p["before"] and "[EMAIL]" in p["after"] for p in places)
    assert places[0]["before"] in corpus(tmp_path / "4")
    make(tmp_path / "none", source)
    assert not (tmp_path / "none" / "pii_audit.json").exists()
    with pytest.raises(ValueError, match="pii_audit: found 5, expected format text and pii = true"):
        make(tmp_path / "none", source, pii=False, pii_audit=5)
