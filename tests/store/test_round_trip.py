"""What a store holds of a text: how documents begin and end, the bytes that are counted, and text that is lost."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.infer.streaming import prompt_ids
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import Char
from ingot.tokenizer.hf_files import import_tokenizer
from ingot.tokenizer.round_trip import RoundTrip, counted_bytes
from tests.tokenizer.hf_helpers import like_qwen, write
from tests.tokenizer.published import SHAPES

TEXTS = ["The cat sat.", "On THE mat", "don't they", "a  b"]


class Messages(Display):
    """A quiet display that keeps what it is told."""

    def __init__(self):
        super().__init__(quiet=True)
        self.messages: list[str] = []

    def notify(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Tokenizer] = {}

    def tokenizer(name: str) -> Tokenizer:
        if name not in made:
            made[name] = import_tokenizer(SHAPES[name](tmp_path_factory.mktemp("published")))
        return made[name]

    return tokenizer


@pytest.mark.parametrize("name", ["Llama 2", "Llama 3", "XLM-R", "CLIP", "GPT-2", "Qwen 2", "T5", "BERT"])
def test_documents_begin_with_the_ids_that_generation_begins_with(name, published, corpus, tmp_path, log):
    tokenizer = published(name)
    build_tokens(corpus(TEXTS), tokenizer, "text", tmp_path / "out", 1, Messages(), log)
    store = Store.open(tmp_path / "out" / "train")
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    ids = store.ids.read(0, store.tokens).tolist()
    assert ids == [id for t in TEXTS for id in (*tokenizer.document_start, *tokenizer.encode(t).tolist(), *end)]
    for number, text in enumerate(TEXTS[1:], 1):  # what generation reads is what training has, in front of every text
        start = store.span(number)[0] + len(tokenizer.document_start)
        prompt = prompt_ids(tokenizer, text)
        assert ids[start - len(tokenizer.start_ids) :][: len(prompt)] == prompt


@pytest.mark.parametrize("name", ["BERT", "CLIP", "GPT-1", "Llama 2", "T5", "GPT-2"])
def test_bytes_are_those_of_the_original(name, published, corpus, tmp_path, log):
    result = build_tokens(corpus(TEXTS), published(name), "text", tmp_path / "out", 1, Messages(), log)
    assert result["train_bytes"] == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize(
    ("name", "text", "counted"),
    [("BERT", "the 漢字 cat", len(" the cat")), ("T5", "the cat 漢", len(" the cat ")), ("GPT-1", "漢 a", len("a "))],
)
def test_unknown_text_is_not_counted(name, text, counted, published):
    tokenizer = published(name)
    assert tokenizer.unknown in tokenizer.encode(text)
    assert counted_bytes(tokenizer, text, tokenizer.encode(text)) == counted


def test_characters_that_vanish_are_not_counted_and_said(corpus, tmp_path, log):
    """A byte-level vocabulary without all bytes and without an unknown token: the library drops the rest."""
    letters = {letter: n for n, letter in enumerate("abcĠ")}
    library = Library(models.BPE(vocab=letters, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<e>"])
    tokenizer = import_tokenizer(write(tmp_path / "tokenizer", library, eos_token="<e>"))
    assert tokenizer.decode(tokenizer.encode("abz c")) == "ab c"
    display = Messages()
    result = build_tokens(corpus(["abz c", "zz", "a"]), tokenizer, "text", tmp_path / "out", 1, display, log)
    assert (result["train_bytes"], result["changed_fraction"]) == (5, 2 / 3)
    assert "decoding restores 1 of 3 texts of a sample; 'z c' becomes ' c'" in display.messages[0]


@pytest.mark.parametrize(
    ("name", "changed", "difference"),
    [
        ("BERT", 4, "'The cat sat.' becomes 'the cat sat.'"),
        ("CLIP", 4, "'The cat sat.' becomes 'the cat sat .'"),
        ("GPT-1", 4, "'The cat sat.' becomes 'the cat sat .'"),
        ("T5", 1, "' b' becomes 'b'"),
        ("GPT-2", 0, ""),
        ("Llama 2", 0, ""),
    ],
)
def test_text_that_decoding_does_not_restore_is_named(name, changed, difference, published, corpus, tmp_path, log):
    display = Messages()
    result = build_tokens(corpus(TEXTS), published(name), "text", tmp_path / "out", 1, display, log)
    found = "".join(message for message in display.messages if "changes text" in message)
    assert result.get("changed_fraction", 0) == changed / len(TEXTS)
    assert difference in found
    assert bool(found) == bool(changed)


@pytest.mark.parametrize("replaced", ["a", "t", "Ġ"])
def test_a_decoder_that_changes_a_lossless_text_is_refused(replaced, corpus, tmp_path, log):
    directory = like_qwen(tmp_path / "tokenizer")
    data = json.loads((directory / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": replaced}, "content": "!"}
    data |= {"normalizer": None, "decoder": {"type": "Sequence", "decoders": [replace, data["decoder"]]}}
    (directory / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = import_tokenizer(directory)
    with pytest.raises(UserError, match=r"becomes '!.*', although it should restore every text"):
        build_tokens(corpus(TEXTS), tokenizer, "text", tmp_path / "out", 1, Messages(), log)


def test_a_text_may_end_where_the_difference_begins(published):
    trip = RoundTrip(Char("ab"))
    trip.add(["ab"], [np.array([0, 1])])
    assert (trip.message, trip.changed) == ("", 0)
    trip = RoundTrip(published("CLIP"))
    trip.add(["a "], [trip.tokenizer.encode("a ")])
    assert trip.difference == (" ", "")


@pytest.mark.parametrize("name", ["char", "BERT", "GPT-1"])
def test_documents_without_an_end_are_said(name, published, corpus, tmp_path: Path, log):
    tokenizer = Char("".join(sorted(set("".join(TEXTS))))) if name == "char" else published(name)
    display = Messages()
    build_tokens(corpus(TEXTS), tokenizer, "text", tmp_path / "out", 1, display, log)
    assert "the tokenizer has no end of text: 4 documents follow each other without a sign" in display.messages[-1]
