"""A token that generation puts before a text and that no training row has is named."""

import json
from types import SimpleNamespace

import pytest

from ingot.stages.training.data import unseen_start
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.tokenizer.hf_files import import_tokenizer
from ingot.tokenizer.train import with_template
from tests.tokenizer.conftest import bpe, corpus, display, log  # noqa: F401  (fixtures)
from tests.tokenizer.hf_helpers import stock
from tests.tokenizer.published import SHAPES

TALK = json.dumps([{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the mat"}])


@pytest.mark.parametrize(
    ("name", "unseen"), [("turns", "<|endoftext|>"), ("Llama 3", "<|begin_of_text|>"), ("header ids", ""), ("text", "")]
)
def test_a_begin_that_conversations_lack_is_named(name, unseen, bpe, corpus, display, log, tmp_path):  # noqa: F811
    tokenizer = bpe
    if name == "Llama 3":
        tokenizer = with_template(import_tokenizer(SHAPES[name](tmp_path / "tokenizer")), "turns")
    elif name == "header ids":
        tokenizer = import_tokenizer(stock(tmp_path / "tokenizer", name))
    format, text = ("text", "the cat") if name == "text" else ("chat", TALK)
    build_tokens(corpus([text]), tokenizer, format, tmp_path / "out", 1, display, log)
    source = SimpleNamespace(store=Store.open(tmp_path / "out" / "train"))
    message = unseen_start(tokenizer, SimpleNamespace(train_sources=[source]))  # type: ignore[arg-type]
    assert bool(message) == bool(unseen)
    assert (
        not unseen or f"tasks of running text begin with {unseen}, which these conversations do not contain" in message
    )
