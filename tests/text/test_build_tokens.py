"""SPEC rows A8 and C3: a corpus becomes a train and a val store, the same for any number of workers."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.text import build
from ingot.text.build import build_tokens
from ingot.text.chat import render, show
from ingot.text.store import Store
from ingot.text.tokenizer import Char
from ingot.text.train_tokenizer import training_texts
from tests.text.text_helpers import SOURCES, documents

PARAGRAPHS = [p for source in SOURCES for p in source.split("\n\n") if p]
SHAKESPEARE = Path(__file__).parents[3] / "shared/data/tinyshakespeare/input.txt"


def chat_text(n: int) -> str:
    question = {"role": "user", "content": f"What is {n} + {n}?"}
    return json.dumps([question, {"role": "assistant", "content": f"{n} + {n} = {2 * n} \u20ac"}], ensure_ascii=False)


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def test_A8_text_documents_end_with_end_of_text(corpus, bpe, display, log, tmp_path):
    train, val = [*PARAGRAPHS[:50], "", "<|endoftext|>"], PARAGRAPHS[50:60]
    result = build_tokens(corpus(train, val), bpe, "text", tmp_path / "out", 2, display, log)
    for split, texts in (("train", train), ("val", val)):
        store = Store.open(tmp_path / "out" / split, tokenizer=bpe.fingerprint)
        for number, text in enumerate(texts):
            ids = store.ids.read(*store.span(number))
            assert bpe.decode(ids[:-1]) == text
            assert ids[-1] == bpe.eot
            assert np.count_nonzero(ids == bpe.eot) == 1
        assert result[f"{split}_documents"] == store.documents == len(texts)
        assert result[f"{split}_tokens"] == store.tokens
        assert result[f"{split}_bytes"] == store.bytes == sum(len(t.encode()) for t in texts)
        assert store.columns["bytes"].read(0, len(texts)).tolist() == [len(t.encode()) for t in texts]
        assert store.identity(1)["offset"] == 100 * (1 if split == "train" else 53)
    assert result["bytes_per_token"] == result["train_bytes"] / result["train_tokens"]
    log.flush()
    assert [e["split"] for e in read_events(log.path, "encoded")] == ["train", "val"]


def test_A8_characters_have_no_end_of_text(corpus, display, log, tmp_path):
    result = build_tokens(corpus(["abc", "é"]), Char("abcé"), "text", tmp_path / "out", 1, display, log)
    assert (result["train_tokens"], result["train_bytes"], result["val_tokens"]) == (4, 5, 0)
    assert Store.open(tmp_path / "out" / "train").ids.read(0, 4).tolist() == [0, 1, 2, 3]
    assert Store.open(tmp_path / "out" / "val").documents == 0


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tinyshakespeare is not on this machine")
def test_A1_C3_tinyshakespeare_store(corpus, display, log, tmp_path):
    text = SHAKESPEARE.read_text(encoding="utf-8")
    tokenizer = Char("".join(set(text)))
    directory = corpus([text[:1_003_854]], [text[1_003_854:]])
    result = build_tokens(directory, tokenizer, "text", tmp_path / "out", 2, display, log)
    assert (tokenizer.vocab, result["train_tokens"], result["val_tokens"]) == (65, 1_003_854, 111_540)
    assert result["bytes_per_token"] == 1


def test_E1_chat_store_has_the_mask_beside_the_ids(corpus, bpe, display, log, tmp_path):
    texts = [chat_text(n) for n in range(30)]
    result = build_tokens(corpus(texts, texts[:3]), bpe, "chat", tmp_path / "out", 2, display, log)
    store = Store.open(tmp_path / "out" / "train")
    mask = store.columns["mask"]
    for number in (0, 7, 29):
        ids, expected = render(json.loads(texts[number]), bpe)
        assert np.array_equal(store.ids.read(*store.span(number)), ids)
        assert np.array_equal(mask.read(*store.span(number)), expected)
    learned = [text for text, is_target in show(store.ids.read(0, 40), mask.read(0, 40), bpe) if is_target]
    assert learned[0] == "0 + 0 = 0 €<|end|>"
    assert result["train_targets"] == mask.read(0, store.tokens).sum()
    assert result["trained_share"] == result["train_targets"] / result["train_tokens"]
    assert store.columns["bytes"].read(7, 8)[0] == len("7 + 7 = 14 €".encode())


@pytest.mark.parametrize("format", ["text", "chat"])
def test_A8_workers_and_slices_leave_no_trace(corpus, bpe, display, log, tmp_path, monkeypatch, format):
    texts = PARAGRAPHS if format == "text" else [chat_text(n) for n in range(200)]
    directory = corpus(texts, texts[:20])
    outputs = []
    for workers, slice_bytes in ((1, 8 << 20), (3, 1), (2, 3000)):
        monkeypatch.setattr(build, "SLICE_BYTES", slice_bytes)
        out = tmp_path / f"out{workers}"
        build_tokens(directory, bpe, format, out, workers, display, log)
        outputs.append(contents(out))
    assert outputs[0] == outputs[1] == outputs[2]


def test_A8_memory_does_not_grow_with_the_corpus(display, log, tmp_path, monkeypatch):
    batch = documents(["all work and no play " * 1500] * 16).to_batches()[0]  # 0.5 MB
    monkeypatch.setattr(build, "SLICE_BYTES", 1 << 17)

    def peak(count: int) -> int:
        monkeypatch.setattr(
            build, "read_documents", lambda _, split, columns: (batch for _ in range(count if split == "train" else 0))
        )
        tokenizer = Char("all work and no play")
        tracemalloc.start()
        build_tokens(tmp_path, tokenizer, "text", tmp_path / str(count), 2, display, log)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(1)
    assert peak(30) < 1.2 * peak(3)


def test_A8_batches_are_cut_at_document_borders(corpus, monkeypatch):
    monkeypatch.setattr(build, "SLICE_BYTES", 10)
    texts = ["12345", "12345", "1", "a longer document than a slice", "", "12", "123456789"]
    slices = [(batch["text"].to_pylist(), size) for batch, size in build._slices(corpus(texts), "train")]
    assert [text for part, _ in slices for text in part] == texts
    assert [size for _, size in slices] == [10, 1, 30, 2, 9]


def test_unseen_character_names_its_document(corpus, display, log, tmp_path):
    directory = corpus(["abc", "cab"], ["abz"])
    with pytest.raises(UserError, match=r"notes/0.jsonl, document at 200: character 'z'"):
        build_tokens(directory, Char("abc"), "text", tmp_path / "out", 2, display, log)
    assert not (tmp_path / "out" / "val" / "manifest.json").exists()


def test_malformed_conversation_names_its_document(corpus, bpe, display, log, tmp_path):
    directory = corpus([chat_text(1), '[{"role": "bot", "content": "x"}]'])
    with pytest.raises(UserError, match=r"notes/0.jsonl, document at 100: conversation, message 1: role 'bot'"):
        build_tokens(directory, bpe, "chat", tmp_path / "out", 2, display, log)


def test_nothing_to_encode_and_chat_of_characters(corpus, display, log, tmp_path):
    directory = corpus([], ["abc"])
    with pytest.raises(UserError, match="no text in the train split"):
        build_tokens(directory, Char("abc"), "text", tmp_path / "out", 2, display, log)
    with pytest.raises(UserError, match="no special tokens"):
        build_tokens(directory, Char("abc"), "chat", tmp_path / "out", 2, display, log)
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


def test_tokenizers_learn_from_the_messages_of_a_chat_corpus(corpus):
    directory = corpus([chat_text(1), chat_text(2)], [chat_text(3)])
    assert list(training_texts(directory, "chat")) == ["What is 1 + 1?", "1 + 1 = 2 €", "What is 2 + 2?", "2 + 2 = 4 €"]
    assert next(training_texts(directory)) == chat_text(1)
