"""SPEC rows A8 and C3: a corpus becomes a train and a val store, the same for any number of workers."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.store import encode
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Char
from ingot.tokenizer.chat import masked_runs, render
from ingot.tokenizer.train import train, training_texts
from tests.conftest import DATA
from tests.corpus.corpus_helpers import make
from tests.tokenizer.test_templates import with_template
from tests.tokenizer.text_helpers import SOURCES, documents, settings

PARAGRAPHS = [p for source in SOURCES for p in source.split("\n\n") if p]
SHAKESPEARE = DATA / "tinyshakespeare/input.txt"


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
    learned = [text for text, is_target in masked_runs(store.ids.read(0, 40), mask.read(0, 40), bpe) if is_target]
    assert learned[0] == "0 + 0 = 0 €<|end|>"
    assert result["train_targets"] == mask.read(0, store.tokens).sum()
    assert result["trained_fraction"] == result["train_targets"] / result["train_tokens"]
    assert store.columns["bytes"].read(7, 8)[0] == len("7 + 7 = 14 €".encode())


@pytest.mark.parametrize("format", ["text", "chat", "pairs", "prompts"])
def test_A8_workers_and_slices_leave_no_trace(corpus, bpe, display, log, tmp_path, monkeypatch, format):
    texts = {
        "text": PARAGRAPHS,
        "chat": [chat_text(n) for n in range(200)],
        "pairs": [pair_text(n) for n in range(100)],
        "prompts": [json.dumps(json.loads(chat_text(n))[:1]) for n in range(200)],
    }[format]
    directory = corpus(texts, texts[:20])
    outputs = []
    for workers, slice_bytes in ((1, 8 << 20), (3, 1), (2, 3000)):
        monkeypatch.setattr(encode, "SLICE_BYTES", slice_bytes)
        out = tmp_path / f"out{workers}"
        build_tokens(directory, bpe, format, out, workers, display, log)
        outputs.append(contents(out))
    assert outputs[0] == outputs[1] == outputs[2]


def test_A8_memory_does_not_grow_with_the_corpus(display, log, tmp_path, monkeypatch):
    batch = documents(["all work and no play " * 1500] * 16).to_batches()[0]  # 0.5 MB
    monkeypatch.setattr(encode, "SLICE_BYTES", 1 << 17)

    def peak(count: int) -> int:
        monkeypatch.setattr(
            encode, "read_documents", lambda _, split, columns: (batch for _ in range(count if split == "train" else 0))
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
    monkeypatch.setattr(encode, "SLICE_BYTES", 10)
    texts = ["12345", "12345", "1", "a longer document than a slice", "", "12", "123456789"]
    slices = [(batch["text"].to_pylist(), size) for batch, size in encode._slices(corpus(texts), "train")]
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
    with pytest.raises(UserError, match="the train split contains no text"):
        build_tokens(directory, Char("abc"), "text", tmp_path / "out", 2, display, log)
    with pytest.raises(UserError, match="no special tokens"):
        build_tokens(directory, Char("abc"), "chat", tmp_path / "out", 2, display, log)
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


def test_tokenizers_learn_from_the_messages_of_a_chat_corpus(corpus):
    directory = corpus([chat_text(1), chat_text(2)], [chat_text(3)])
    assert [text for _, text in training_texts(directory, "chat")] == [
        "What is 1 + 1?",
        "1 + 1 = 2 €",
        "What is 2 + 2?",
        "2 + 2 = 4 €",
    ]
    assert next(training_texts(directory)) == ("notes", chat_text(1))


def pair_text(n: int, **parts: Any) -> str:
    said = {"chosen": f"It is {2 * n}.", "rejected": f"It is {2 * n + 1}, \u20ac!"}
    sides = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
    return json.dumps({"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], **sides, **parts})


def test_pairs_are_adjacent_documents_with_the_answers_masked_in(corpus, bpe, display, log, tmp_path):
    history = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "not learned"},
        {"role": "user", "content": "and?"},
    ]
    texts = [pair_text(1), pair_text(2, prompt=history), *(pair_text(n) for n in range(3, 9))]
    result = build_tokens(corpus(texts, texts[:2]), bpe, "pairs", tmp_path / "out", 2, display, log)
    store = Store.open(tmp_path / "out" / "train")
    assert (store.content, store.group, store.documents) == ("pairs", 2, 16)
    assert (result["train_pairs"], result["val_pairs"], result["train_documents"]) == (8, 2, 16)
    mask, sizes = store.columns["mask"], store.columns["bytes"].read(0, 16)
    for number, text in enumerate(texts):
        pair = json.loads(text)
        prompt, _ = render(pair["prompt"], bpe, generation_prompt=True)
        for place, side in enumerate(("chosen", "rejected")):
            span = store.span(2 * number + place)
            ids, learned = store.ids.read(*span), mask.read(*span)
            answer = pair[side][0]["content"]
            assert np.array_equal(ids[: len(prompt)], prompt)
            assert not learned[: len(prompt)].any()
            assert learned[len(prompt) :].all()
            assert bpe.decode(ids[len(prompt) :]) == answer + "<|end|>"
            assert ids[-1] == bpe.specials["<|end|>"]
            assert sizes[2 * number + place] == len(answer.encode())
            assert store.identity(2 * number + place)["offset"] == 100 * number
    assert result["train_targets"] == mask.read(0, store.tokens).sum()
    assert result["bytes_per_token"] == sizes.sum() / result["train_targets"]


def test_pairs_and_prompts_of_a_template_that_rewrites_earlier_turns(bpe, corpus, display, log, tmp_path):
    """It drops earlier answers, so they cannot be learned; as context of a pair or a prompt they need not be."""
    source = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(bpe, source)
    history = [*json.loads(chat_text(3)), {"role": "user", "content": "and?"}]
    directory = corpus([pair_text(1, prompt=history)], [pair_text(2)])
    build_tokens(directory, tokenizer, "pairs", tmp_path / "pairs", 1, display, log)
    store = Store.open(tmp_path / "pairs" / "train")
    ids, mask = (column.read(*store.span(0)) for column in (store.ids, store.columns["mask"]))
    asked = "<|user|>What is 3 + 3?<|end|><|user|>and?<|end|><|assistant|>"
    assert masked_runs(ids, mask, tokenizer) == [(asked, False), ("It is 2.<|end|>", True)]
    build_tokens(
        _plain_corpus(tmp_path, [json.dumps(history)]), tokenizer, "prompts", tmp_path / "out", 1, display, log
    )
    store = Store.open(tmp_path / "out" / "train")
    assert tokenizer.decode(store.ids.read(*store.span(0))) == asked
    assert not store.columns["mask"].read(0, store.tokens).any()


def test_prompts_end_where_the_answer_begins_and_keep_their_fields(corpus, bpe, display, log, tmp_path):
    texts = [json.dumps([{"role": "user", "content": f"What is {n} + {n}?"}]) for n in range(20)]
    extras = [json.dumps({"answer": 2 * n}) if n % 2 else None for n in range(20)]
    result = build_tokens(corpus(texts, texts[:3], extras), bpe, "prompts", tmp_path / "out", 2, display, log)
    store = Store.open(tmp_path / "out" / "train")
    assert (store.content, store.group, store.documents, store.bytes) == ("prompts", 1, 20, 0)
    assert not store.columns["mask"].read(0, store.tokens).any()
    for number, text in enumerate(texts):
        prompt, _ = render(json.loads(text), bpe, generation_prompt=True)
        assert np.array_equal(store.ids.read(*store.span(number)), prompt)
        assert prompt[-1] == bpe.specials["<|assistant|>"]
        assert store.identity(number)["extra"] == extras[number]
    assert "bytes_per_token" not in result
    assert "train_targets" not in result
    build_tokens(_plain_corpus(tmp_path, ["some text"]), bpe, "text", tmp_path / "text", 1, display, log)
    assert "extra" not in Store.open(tmp_path / "text" / "train").identity(0)


def _plain_corpus(tmp_path: Path, texts: list[str]) -> Path:
    directory = tmp_path / "plain"
    directory.mkdir()
    pq.write_table(documents(texts), directory / "documents-00000.parquet")
    return directory


@pytest.mark.parametrize("format", ["pairs", "prompts"])
def test_pairs_and_prompts_need_special_tokens_and_whole_messages(corpus, bpe, display, log, tmp_path, format):
    broken = {"pairs": pair_text(2, chosen=[{"role": "bot", "content": "x"}]), "prompts": '[{"role": "bot"}]'}[format]
    good = {"pairs": pair_text(1), "prompts": '[{"role": "user", "content": "x"}]'}[format]
    directory = corpus([good, broken])
    with pytest.raises(UserError, match="no special tokens"):
        build_tokens(directory, Char("abc"), format, tmp_path / "out", 1, display, log)
    with pytest.raises(UserError, match=r"document at 100: conversation, message .: role"):
        build_tokens(directory, bpe, format, tmp_path / "out", 1, display, log)


def test_tokenizers_learn_from_both_sides_of_pairs(corpus):
    directory = corpus([pair_text(1)])
    assert [text for _, text in training_texts(directory, "pairs")] == [
        "What is 1 + 1?",
        "It is 2.",
        "It is 3, \u20ac!",
    ]


@pytest.mark.skipif(not DATA.exists(), reason="the public data sets are not on this machine")
def test_real_pairs_and_prompts_through_corpus_and_store(bpe, display, log, tmp_path):
    pairs = DATA / "instructions" / "instruction-data-with-preference.json"
    make(tmp_path / "pairs", pairs, format="pairs", holdout={"fraction": 0.1})
    result = build_tokens(tmp_path / "pairs", bpe, "pairs", tmp_path / "pairs-out", 1, display, log)
    assert result["train_pairs"] + result["val_pairs"] == 1094
    store = Store.open(tmp_path / "pairs-out" / "train")
    prompt = {store.identity(0)["extra"], store.identity(1)["extra"]}
    assert len(prompt) == 1
    assert list(json.loads(prompt.pop())) == ["output"]
    make(tmp_path / "prompts", DATA / "gsm8k" / "test.jsonl", format="prompts", holdout={"fraction": 0.1})
    result = build_tokens(tmp_path / "prompts", bpe, "prompts", tmp_path / "prompts-out", 1, display, log)
    assert result["train_documents"] + result["val_documents"] == 1319
    assert "####" in json.loads(Store.open(tmp_path / "prompts-out" / "train").identity(7)["extra"])["answer"]


def test_words_that_are_unknown_are_counted_and_spell_nothing(corpus, tmp_path, display, log):
    directory = corpus(["the cat sat"], ["the dog sat"])
    words, _ = train(settings(type="word"), training_texts(directory), display, log)
    result = build_tokens(directory, words, "text", tmp_path / "store", 1, display, log)
    assert (result["train_unknown_fraction"], result["val_unknown_fraction"]) == (0.0, 1 / 3)
    assert (result["train_bytes"], result["val_bytes"]) == (len("the cat sat"), len(" the sat"))
