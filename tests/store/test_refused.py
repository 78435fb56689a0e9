"""Conversations that a chat template refuses are left out of the store, counted and listed; the others stay."""

import json
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.store import encode
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.tokenizer.chat import render
from ingot.tokenizer.hf_files import TURNS_JINJA
from tests.tokenizer.test_templates import with_template

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TURNS_JINJA
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TURNS_JINJA
UNDEFINED = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content.name.first }}{% endif %}{% endfor %}" + TURNS_JINJA
)
KEY_ERROR = "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A'}[m.role] + '' }}{% endfor %}" + TURNS_JINJA


def said(*roles: str) -> str:
    return json.dumps([{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)])


GOOD = [said("user", "assistant"), said("user", "assistant", "user", "assistant"), said("user", "assistant") + " "]
CASES = [
    (ALTERNATE, said("user", "user", "assistant"), "rejects this conversation: roles must alternate"),
    (ALTERNATE, said("assistant", "user", "assistant"), "rejects this conversation: roles must alternate"),
    (NO_SYSTEM, said("system", "user", "assistant"), "rejects this conversation: no system message"),
    (UNDEFINED, said("user", "tool", "assistant"), "'str object' has no attribute 'name'"),
    (KEY_ERROR, said("system", "user", "assistant"), "'dict object' has no attribute 'system'"),
]


class Notices(Display):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def notify(self, message: str) -> None:
        self.lines.append(message)


def quarantined(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("source", "bad", "words"), CASES)
def test_one_refused_conversation_does_not_end_the_stage(corpus, bpe, log, tmp_path, source, bad, words):
    tokenizer, display = with_template(bpe, source), Notices()
    result = build_tokens(corpus([GOOD[0], bad, *GOOD[1:]], [bad]), tokenizer, "chat", tmp_path, 1, display, log)
    store = Store.open(tmp_path / "train")
    stored = [store.ids.read(*store.span(n)).tolist() for n in range(store.documents)]
    assert stored == [render(json.loads(text), tokenizer)[0].tolist() for text in GOOD]
    assert [store.identity(n)["offset"] for n in range(3)] == [0, 200, 300]  # each keeps its own origin
    names = ("train_documents", "train_refused", "val_documents", "val_refused")
    assert [result[name] for name in names] == [3, 1, 0, 1]
    records = quarantined(tmp_path)
    assert [(r["path"], r["offset"]) for r in records] == [("notes/0.jsonl", 100), ("notes/1.jsonl", 400)]
    assert all(words in r["reason"] for r in records)
    line = next(line for line in display.lines if "1 of 4 documents of the train split" in line)
    assert words in line
    assert "notes/0.jsonl, document at 100" in line


def test_the_store_is_the_same_for_any_slices(corpus, bpe, display, log, tmp_path, monkeypatch):
    """Whatever is encoded together: refused first, last, alone in a slice, and several at once."""
    bad = said("user", "user", "assistant")
    texts = [bad, *GOOD, bad, bad, GOOD[0] + "  ", bad]
    directory = corpus(texts)
    tokenizer = with_template(bpe, ALTERNATE)
    found = []
    for size in (1, 150, 1 << 20):
        monkeypatch.setattr(encode, "SLICE_BYTES", size)
        out = tmp_path / str(size)
        build_tokens(directory, tokenizer, "chat", out, 2, display, log)
        found.append([(out / "train" / name).read_bytes() for name in ("ids.bin", "mask.bin")] + [quarantined(out)])
    assert found[0] == found[1] == found[2]
    assert [r["offset"] for r in found[0][2]] == [0, 400, 500, 700]


def test_a_pair_is_refused_as_a_whole_and_prompts_too(corpus, bpe, display, log, tmp_path):
    def pair(chosen: list[str], rejected: list[str]) -> str:
        sides = {"prompt": ["user"], "chosen": chosen, "rejected": rejected}
        return json.dumps({name: json.loads(said(*roles)) for name, roles in sides.items()})

    tokenizer = with_template(bpe, ALTERNATE)
    texts = [pair(["assistant"], ["assistant"]), pair(["assistant"], ["user", "assistant"])]
    result = build_tokens(corpus(texts), tokenizer, "pairs", tmp_path / "pairs", 1, display, log)
    assert (result["train_pairs"], result["train_documents"], result["train_refused"]) == (1, 2, 1)


def test_refused_prompts(corpus, bpe, display, log, tmp_path):
    texts = [said("user"), said("user", "user"), said("user", "assistant", "user")]
    result = build_tokens(corpus(texts), with_template(bpe, ALTERNATE), "prompts", tmp_path, 1, display, log)
    assert (result["train_documents"], result["train_refused"]) == (2, 1)


def test_reasoning_that_the_format_does_not_show(corpus, bpe, display, log, tmp_path):
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
    result = build_tokens(corpus([*GOOD, json.dumps(thought)]), bpe, "chat", tmp_path, 1, display, log)
    assert (result["train_documents"], result["train_refused"]) == (3, 1)
    assert 'set reasoning = "drop" in the corpus stage' in quarantined(tmp_path)[0]["reason"]


def test_all_refused_is_an_error_that_says_so(corpus, bpe, display, log, tmp_path):
    texts = [said("user", "user", "assistant")] * 3
    with pytest.raises(
        UserError, match="the chat template refuses all 3 documents of the train split; the first is"
    ) as e:
        build_tokens(corpus(texts), with_template(bpe, ALTERNATE), "chat", tmp_path / "out", 1, display, log)
    assert "notes/0.jsonl, document at 0: chat template rejects this conversation: roles must alternate" in str(e.value)
    assert not (tmp_path / "out" / "quarantine.jsonl").exists()


def test_a_document_that_is_no_conversation_is_still_an_error(corpus, bpe, display, log, tmp_path):
    with pytest.raises(UserError, match=r"notes/1.jsonl, document at 300: conversation: not JSON"):
        build_tokens(corpus([*GOOD, "["]), with_template(bpe, ALTERNATE), "chat", tmp_path, 1, display, log)
