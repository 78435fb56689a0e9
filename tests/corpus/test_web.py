"""Pages of the web: HTML files, WARC and WET archives; what is not read is named, nothing becomes text with tags."""

import gzip
import io
import json
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.corpus.documents import iter_texts, read_documents
from tests.corpus.corpus_helpers import make, quarantine

fastwarc = pytest.importorskip("fastwarc.warc")
ARTICLE = " ".join(f"Sentence {i} of the article says that rivers carry water to the sea." for i in range(30))
PAGE = f"""<!DOCTYPE html>
<html lang="en"><head><title>On rivers</title><script>var x = "secret";</script><style>p {{ color: red }}</style></head>
<body><nav><a href="/">Home</a> <a href="/about">About us</a></nav>
<main><h1>Rivers</h1><p>{ARTICLE}</p></main>
<footer>Copyright, imprint, cookies</footer></body></html>"""
REAL = Path(__file__).parents[3] / "shared" / "data" / "warc"


def archive(records: list[tuple[str, dict[str, Any], bytes]], packed: bool = True) -> bytes:
    """A WARC file: (type, {status, type, url}, body) of each record."""
    out = io.BytesIO()
    for kind, facts, body in records:
        if kind == "response":
            head = f"HTTP/1.1 {facts.get('status', 200)} OK\r\nContent-Type: {facts.get('type', 'text/html')}\r\n"
            head += facts.get("headers", "") + "\r\n"
            body, type_ = head.encode() + body, "application/http; msgtype=response"
        else:
            type_ = "text/plain"
        header = (
            f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{len(out.getvalue())}>\r\n"
            f"WARC-Target-URI: {facts.get('url', 'http://example.org/')}\r\nWARC-Date: 2024-05-01T00:00:00Z\r\n"
            f"Content-Type: {type_}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        record = header.encode() + body + b"\r\n\r\n"
        out.write(gzip.compress(record) if packed else record)
    return out.getvalue()


@pytest.mark.parametrize(("html", "navigation"), [("main", False), ("trafilatura", False), ("plain", True)])
def test_B8_html_becomes_its_text(html: str, navigation: bool, tmp_path: Path):
    if html == "trafilatura":
        pytest.importorskip("trafilatura")
    (tmp_path / "page.html").write_text(PAGE)
    make(tmp_path / "out", tmp_path / "page.html", html=html)
    (text,) = iter_texts(tmp_path / "out")
    assert "rivers carry water" in text
    assert ("About us" in text) == navigation
    assert not any(hidden in text for hidden in ("secret", "color", "<", "On rivers"))
    (batch,) = read_documents(tmp_path / "out", None, ["metadata"])
    assert '"title": "On rivers"' in batch["metadata"][0].as_py()
    assert '"language": "en"' in batch["metadata"][0].as_py()


def test_B8_html_is_told_by_its_content_and_its_encoding_by_its_declaration(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(PAGE)
    (folder / "b.htm").write_text("<p>A fragment without a head.</p>")
    declared = (
        "<html><head><meta charset='koi8-r'></head><body><p>Река несёт воду в море каждый день.</p></body></html>"
    )
    (folder / "c.html").write_bytes(declared.encode("koi8-r"))
    (folder / "d.md").write_text("# Markdown\n\nwith <b>tags</b> stays as it is")
    (folder / "e.html.gz").write_bytes(gzip.compress(PAGE.replace("Sentence", "Packed").encode()))
    make(tmp_path / "out", folder, html="plain", pii=False)
    texts = dict(zip("abcde", iter_texts(tmp_path / "out"), strict=True))
    assert "<" not in texts["a"] + texts["b"] + texts["e"]
    assert texts["b"].strip() == "A fragment without a head."
    assert "Река несёт воду в море" in texts["c"]
    assert "<b>tags</b>" in texts["d"]


def test_B8_archives_give_one_document_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [
        ("warcinfo", {}, b"software: test"),
        ("request", {}, b"GET / HTTP/1.1\r\n\r\n"),
        ("response", {"url": "http://a.org/1"}, PAGE.encode()),
        ("response", {"url": "http://a.org/2", "status": 404}, b"<p>not found</p>"),
        ("response", {"url": "http://a.org/3", "type": "image/png"}, b"\x89PNG\r\n"),
        ("response", {"url": "http://a.org/4", "type": "text/plain; charset=utf-8"}, "plain wörds".encode()),
        ("conversion", {"url": "http://a.org/5"}, b"extracted text"),
    ]
    for name, packed in (("crawl.warc.gz", True), ("crawl.warc", False)):
        (tmp_path / name).write_bytes(archive(records, packed))
        out = tmp_path / f"out-{name}"
        make(out, tmp_path / name)
        texts = list(iter_texts(out))
        assert len(texts) == 3
        assert "rivers carry water" in texts[0]
        assert texts[1:] == ["plain wörds", "extracted text"]
        (batch,) = read_documents(out, None, ["metadata", "offset"])
        assert '"url": "http://a.org/1"' in batch["metadata"][0].as_py()
        assert len(set(batch["offset"].to_pylist())) == 3


def _chunked(body: bytes, size: int = 100) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_B8_bodies_are_decoded_where_a_crawler_stored_them_as_they_came(tmp_path: Path):
    """And are read as they are where it only names the codings."""
    chunked, packed = "Transfer-Encoding: chunked\r\n", "content-encoding: gzip\r\n"
    page, deflate = PAGE.encode(), zlib.compressobj(wbits=-15)
    bodies = [
        (chunked, _chunked(page)),
        (chunked + packed, _chunked(gzip.compress(page))),
        (packed, gzip.compress(page)),
        ("Content-Encoding: deflate\r\n", zlib.compress(page)),
        ("Content-Encoding: deflate\r\n", deflate.compress(page) + deflate.flush()),
        (chunked + packed, page),
        ("Content-Encoding: br\r\n", page),
        ("Content-Encoding: br\r\n", b"\xce\xb2\xcf\x00\x80\xff"),
        (chunked, _chunked(page)[:-200]),
        (packed, gzip.compress(page)[:-20]),
        (packed, gzip.compress(b"<p>" + bytes(3_000_000))),
    ]
    records = [("response", {"headers": headers}, body) for headers, body in bodies]
    (tmp_path / "crawl.warc").write_bytes(archive(records, packed=False))
    make(tmp_path / "out", tmp_path / "crawl.warc", dedup={"exact": False}, max_document_mb=1)
    (tmp_path / "page.html").write_text(PAGE)
    make(tmp_path / "one", tmp_path / "page.html")
    assert list(iter_texts(tmp_path / "out")) == 7 * [next(iter(iter_texts(tmp_path / "one")))]
    reasons = [record["reason"] for record in quarantine(tmp_path / "out")]
    assert len(reasons) == 4
    for reason, part in zip(reasons, ("is br", "last chunk is missing", "cut off", "max_document_mb"), strict=True):
        assert part in reason


def test_B8_records_that_are_not_read_are_counted(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    kinds = ("resource", "revisit", "continuation", "request", "metadata")
    records: list[Any] = [(kind, {}, PAGE.encode()) for kind in kinds]
    dns = archive([("conversion", {}, b"20240501 192.0.2.1")], packed=False)
    dns = dns.replace(b"WARC-Type: conversion", b"WARC-Type: response").replace(b"text/plain", b"text/dns")
    (tmp_path / "a.warc").write_bytes(archive([*records, ("conversion", {}, b"some text")], packed=False) + dns)
    make(tmp_path / "out", tmp_path / "a.warc")
    assert list(iter_texts(tmp_path / "out")) == ["some text"]
    (line,) = [str(one.message) for one in recwarn if "not read" in str(one.message)]
    assert all(f"1 records of type {kind}" in line for kind in kinds[:3])
    assert "1 responses of type text/dns" in line


def test_B8_a_guessed_encoding_is_named(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    text = "<html><body><p>" + "Voilà déjà l'été, dit-elle à sa sœur. " * 20 + "</p></body></html>"
    (tmp_path / "guessed.html").write_bytes(text.encode("cp1252"))
    (tmp_path / "wrong.html").write_bytes(b"<meta charset='utf-8'>" + text.encode("cp1252"))
    (tmp_path / "declared.html").write_bytes(b"<meta charset='windows-1252'>" + text.encode("cp1252"))
    (tmp_path / "utf8.html").write_bytes(text.encode())
    make(tmp_path / "out", tmp_path, html="plain", dedup={"exact": False})
    assert [text.count("Voilà déjà l'été, dit-elle à sa sœur.") for text in iter_texts(tmp_path / "out")] == [20] * 4
    (line,) = [str(one.message) for one in recwarn if "encoding of 1 page" in str(one.message)]
    assert "guessed.html and 1 more: encoding of 1 page: cp1252, guessed" in line


def test_B8_a_truncated_archive_keeps_its_complete_pages(tmp_path: Path):
    whole = archive([("response", {"url": f"http://a.org/{i}"}, PAGE.encode()) for i in range(3)], packed=False)
    (tmp_path / "crawl.warc").write_bytes(whole[:-500])
    make(tmp_path / "out", tmp_path / "crawl.warc", dedup={"exact": False})
    assert len(list(iter_texts(tmp_path / "out"))) == 2
    (lost,) = quarantine(tmp_path / "out")
    assert "the record is cut off after" in lost["reason"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("crawl.warc", b"WARC/1.0\r\ngarbage\r\n\r\nmore garbage\r\n" * 3, "is corrupt"),
        ("crawl.warc.bz2", __import__("bz2").compress(archive([("conversion", {}, b"text")])), "is packed twice"),
        ("crawl.arc", b"filedesc://crawl.arc 0.0.0.0 20240501 text/plain 76\n", "is an ARC archive"),
    ],
)
def test_B8_damaged_archives_are_quarantined(name: str, content: bytes, reason: str, tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.txt").write_text("good text")
    (folder / name).write_bytes(content)
    make(tmp_path / "out", [folder / "good.txt", {"path": str(folder / "*")}], dedup={"exact": True})
    assert list(iter_texts(tmp_path / "out")) == ["good text"]
    assert any(reason in record["reason"] for record in quarantine(tmp_path / "out"))


def test_B8_without_the_packages_pages_are_named_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("fastwarc.warc", "resiliparse.extract.html2text"):
        monkeypatch.setitem(sys.modules, name, None)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("good text")
    (folder / "b.html").write_text(PAGE)
    (folder / "c.warc").write_bytes(archive([("conversion", {}, b"text")], packed=False))
    make(tmp_path / "out", folder)
    assert list(iter_texts(tmp_path / "out")) == ["good text"]
    assert [r["reason"].partition(";")[0] for r in quarantine(tmp_path / "out")] == ["is HTML", "is a WARC archive"]
    assert all("pip install 'ingot[corpus]'" in record["reason"] for record in quarantine(tmp_path / "out"))
    with pytest.raises(UserError, match="is HTML; pip install"):
        make(tmp_path / "alone", folder / "b.html")
    make(tmp_path / "tags", {"path": str(folder / "b.html"), "kind": "text"})
    assert "<nav>" in next(iter(iter_texts(tmp_path / "tags")))


def test_B8_rows_are_wanted_where_pages_are(tmp_path: Path):
    (tmp_path / "page.html").write_text(PAGE)
    with pytest.raises(UserError, match='holds pages of the web, but format = "chat" needs rows'):
        make(tmp_path / "out", tmp_path / "page.html", format="chat")


@pytest.mark.skipif(not REAL.exists(), reason="needs shared/data/warc")
def test_B8_a_real_page_says_what_its_extracted_text_says(tmp_path: Path):
    """Token F1 of the plain text of the WARC and Common Crawl's own text (WET)."""
    words = {}
    for name in ("whirlwind.warc.gz", "whirlwind.warc.wet.gz"):
        make(tmp_path / name, REAL / name, html="plain", pii=False)
        (text,) = iter_texts(tmp_path / name)
        words[name] = text.split()
    ours, theirs = words.values()
    common = sum(min(ours.count(w), theirs.count(w)) for w in {*ours} & {*theirs})
    assert 2 * common / (len(ours) + len(theirs)) > 0.9


@pytest.mark.slow
def test_B8_a_crawl_of_a_thousand_pages_becomes_tokens(tmp_path: Path):
    """Near-copies (other navigation, other words) go, errors and pictures are not read, every page is accounted for."""
    draw = random.Random(5)

    def page(text: str, number: int) -> bytes:
        links = "".join(f"<a href='/{draw.random()}'>Place {draw.random()}</a>" for _ in range(number % 7))
        head = f"<html lang=en><head><title>{number}</title></head>"
        return f"{head}<body><nav>{links}</nav><p>{text}</p></body></html>".encode()

    def prose() -> str:
        return " ".join(f"word{draw.randrange(5_000)}" for _ in range(200)) + "."

    texts = [prose() for _ in range(1_000)]
    records = [("response", {"url": f"http://example.org/{i}"}, page(text, i)) for i, text in enumerate(texts)]
    copied = [text.replace("word1", "other1", 2) for text in texts[:50]]
    records += [("response", {}, page(text, i)) for i, text in enumerate(copied)]
    records += [("response", {"status": 404}, page("Not found", i)) for i in range(20)]
    records += [("response", {"type": "image/png"}, b"\x89PNG") for _ in range(20)]
    (tmp_path / "crawl.warc.gz").write_bytes(archive(records))
    (tmp_path / "crawl.toml").write_text(
        '[run]\nname = "crawl"\n[stage.pages]\nkind = "corpus"\nsources = ["crawl.warc.gz"]\nquality = "none"\n'
        "dedup = { minhash = {} }\n[stage.bpe]\nkind = 'tokenizer'\nfrom = 'pages'\nvocab = 300\n"
        "[stage.tokens]\nkind = 'tokens'\ncorpus = 'pages'\ntokenizer = 'bpe'\n"
    )
    command = [sys.executable, "-m", "ingot", "run", "crawl.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "crawl"
    counts = json.loads((run / "pages" / "funnel.json").read_text())
    assert counts["in"]["documents"] == 1_050
    assert counts["dropped"]["near_duplicate"]["documents"] == 50
    assert counts["kept"]["documents"] == 1_000
    result = json.loads((run / "tokens" / "result.json").read_text())
    assert sum(result[f"{split}_documents"] for split in ("train", "val")) == 1_000
    assert result["train_tokens"] > 200_000
