"""Search in stores: every place of a phrase, against a scan of the decoded text."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.store import search
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.store.search import SEPARATOR, SearchIndex, index_problems, open_index
from ingot.store.suffix_array import find, longest_prefix, suffix_array
from ingot.tokenizer.byte_bpe import ByteBPE, Char

TEXTS = st.binary(max_size=200) | st.text("ab", max_size=200).map(str.encode)


def _sorted_suffixes(text: bytes) -> list[int]:
    return sorted(range(len(text)), key=lambda i: text[i:])


@given(TEXTS)
def test_suffix_array(text: bytes) -> None:
    text += b"\xff"
    assert suffix_array(np.frombuffer(text, np.uint8)).tolist() == _sorted_suffixes(text)


def test_suffix_array_of_long_repeats() -> None:
    text = b"ab" * 700 + b"\0" * 300 + b"ab" * 650 + b"\xff"
    assert suffix_array(np.frombuffer(text, np.uint8)).tolist() == _sorted_suffixes(text)


@given(TEXTS, st.data())
def test_find_is_a_scan(text: bytes, data: st.DataObject) -> None:
    text += b"\xff"
    first = data.draw(st.integers(0, len(text) - 1))
    phrase = text[first : data.draw(st.integers(first + 1, len(text)))] + data.draw(st.binary(max_size=2))
    suffixes = suffix_array(np.frombuffer(text, np.uint8))
    low, high = find(text, suffixes, phrase)
    assert sorted(suffixes[low:high].tolist()) == [i for i in range(len(text)) if text.startswith(phrase, i)]
    lengths = [n for n in range(len(phrase) + 1) if phrase[:n] in text]
    assert longest_prefix(text, suffixes, phrase) == max(lengths)


def test_longest_prefix_beyond_what_is_compared_first() -> None:
    text = bytes(random.Random(0).choices(b"abc", k=3000)) + b"\xff"
    suffixes = suffix_array(np.frombuffer(text, np.uint8))
    for length in (255, 256, 257, 1024, 1500):
        assert longest_prefix(text, suffixes, text[700 : 700 + length] + b"x") == length


def _texts() -> list[str]:
    """Documents of few words, so that phrases repeat, some with signs of several bytes; one is empty."""
    draw = random.Random(1)
    words = ["the", "a", "of", "sat", "on", "mat", "cat", "Größe", "語", "—", "naïve\n\n", "ends."]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(40)]
    return [*texts[:20], "", *texts[20:]]


@pytest.fixture
def store(corpus: Callable[..., Path], bpe: ByteBPE, tmp_path: Path, display: Display, log: EventLog) -> Store:
    build_tokens(corpus(_texts()), bpe, "text", tmp_path / "tokens", 1, display, log)
    return Store.open(tmp_path / "tokens" / "train", tokenizer=bpe.fingerprint)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PART_BYTES", 700)


def test_every_place_of_a_phrase(store: Store, bpe: ByteBPE, display: Display, small_parts: None) -> None:
    index, texts, draw = open_index(store, bpe, display), _texts(), random.Random(2)
    assert len(list(index.path.glob("*.text"))) > 3
    ends = np.cumsum([len(text.encode()) + 2 for text in texts])  # the end of text, and of the document
    assert index.ends.tolist() == ends.tolist()
    phrases = ["the cat", "語 — naïve", "mat sat on the a of", "é", "he ca", "zebra"]
    for text in draw.sample([text for text in texts if text], 10):
        first = draw.randrange(len(text))
        phrases.append(text[first : first + draw.randrange(1, 40)])
    for phrase in phrases:
        data = phrase.encode()
        expected = [
            (number, match.start())
            for number, text in enumerate(texts)
            for match in re.finditer(b"(?=" + re.escape(data) + b")", text.encode())
        ]
        places = list(index.places(data))
        found = [(p.document, p.start - int(ends[p.document]) + len(texts[p.document].encode()) + 2) for p in places]
        assert found == expected
        assert index.count(data) == len(expected)
        for place in places[:5]:
            start, stop = index.tokens(place, len(data))
            first, last = store.span(place.document)
            assert first <= start < stop <= last
            assert data in bpe.decode_bytes(store.ids.read(start, stop))
            assert data not in bpe.decode_bytes(store.ids.read(start + 1, stop))
            assert data not in bpe.decode_bytes(store.ids.read(start, stop - 1))


def test_no_phrase_spans_two_documents(store: Store, bpe: ByteBPE, display: Display) -> None:
    index, texts = open_index(store, bpe, display), [text for text in _texts() if text]
    spanning = (texts[3][-12:] + texts[4][:12]).encode()
    assert index.count(spanning) == 0
    assert 12 <= index.longest_prefix(spanning) < len(spanning)
    (place,) = [p for p in index.places(texts[4].encode()) if index.document_text(p.document)[:-2] == texts[4].encode()]
    assert index.around(place, len(texts[4].encode()), 40) == ("", "")
    assert index.around(place, 3, 10) == ("", texts[4].encode()[3:13].decode(errors="ignore"))
    assert index.document_text(place.document) == texts[4].encode() + bytes([SEPARATOR] * 2)


def test_conversations_are_searched_message_by_message(
    corpus: Callable[..., Path], bpe: ByteBPE, tmp_path: Path, display: Display, log: EventLog
) -> None:
    talk = [[{"role": "user", "content": "say it twice"}, {"role": "assistant", "content": "it, it"}]]
    build_tokens(corpus([json.dumps(one) for one in talk]), bpe, "chat", tmp_path / "tokens", 1, display, log)
    index = open_index(Store.open(tmp_path / "tokens" / "train"), bpe, display)
    assert [index.count(text) for text in (b"say it twice", b"it, it", b"twice it")] == [1, 1, 0]
    assert [index.around(place, 3, 99) for place in index.places(b"say")] == [("", " it twice")]


def test_characters(corpus: Callable[..., Path], tmp_path: Path, display: Display, log: EventLog) -> None:
    """A vocabulary without special tokens, whose documents only the index separates."""
    char = Char("abcé ")
    build_tokens(corpus(["abc é", "é abc"]), char, "text", tmp_path / "tokens", 1, display, log)
    index = open_index(Store.open(tmp_path / "tokens" / "train"), char, display)
    assert [index.count(text.encode()) for text in ("é", "abc", "éé")] == [2, 2, 0]
    assert [index.tokens(place, 2) for place in index.places("é".encode())] == [(4, 5), (5, 6)]


def test_a_killed_build_continues(
    store: Store, bpe: ByteBPE, display: Display, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupted(text: np.ndarray) -> np.ndarray:
        calls.append(len(text))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return suffix_array(text)

    monkeypatch.setattr(search, "suffix_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_index(store, bpe, display)
    (path,) = store.path.glob("search-*")
    kept = {f.name: f.stat().st_mtime_ns for f in path.glob("part-0000[01].*")}
    assert len(kept) == 4
    assert not [*path.glob("*.tmp"), *path.glob(".*.tmp")]
    index = open_index(store, bpe, display)
    assert {f.name: f.stat().st_mtime_ns for f in path.glob("part-0000[01].*")} == kept
    assert len(calls) == 1 + len(list(path.glob("*.text")))
    assert index.count(b"the") == sum(text.count("the") for text in _texts())


def test_refusals(store: Store, bpe: ByteBPE, display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"found 1\.0 kB of free memory, expected .* for the index of .* of text"):
        open_index(store, bpe, display)
    monkeypatch.undo()
    index = open_index(store, bpe, display)
    with (index.path / "part-00000.suffixes").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(UserError, match=r"part-00000\.suffixes: 8 bytes, expected .*; delete .* and search again"):
        SearchIndex(store, index.path)


def test_a_flipped_bit_is_found_by_verify(store: Store, bpe: ByteBPE, display: Display) -> None:
    index = open_index(store, bpe, display)
    assert not [*index_problems(store.path.parent)]
    with (index.path / "part-00000.suffixes").open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    (problem,) = index_problems(store.path.parent)
    expected = f"part-00000.suffixes: content differs from its digest; delete {index.path} and search again"
    assert problem.endswith(expected)
    (index.path / "manifest.json").write_text("[]")
    assert [problem.partition("manifest.json")[2][:12] for problem in index_problems(store.path)] == [": is damaged"]


def test_what_a_build_left_half_written_is_written_again(store: Store, bpe: ByteBPE, display: Display) -> None:
    index = open_index(store, bpe, display)
    expected = index.count(b"the")
    (index.path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json: is damaged; delete .*search-.* and search again"):
        open_index(store, bpe, display)
    (index.path / "manifest.json").unlink()
    for file in index.path.glob("part-*"):
        with file.open("r+b") as opened:
            opened.truncate(8)
    assert open_index(store, bpe, display).count(b"the") == expected > 0


def test_an_index_of_an_older_store_is_replaced(store: Store, bpe: ByteBPE, display: Display) -> None:
    old = store.path / "search-0123456789ab"
    old.mkdir()
    open_index(store, bpe, display)
    assert not old.exists()
