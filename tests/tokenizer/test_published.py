"""Tokenizers of the shapes that published models have, against `transformers` on the same files."""

from pathlib import Path

import pytest

from ingot.tokenizer.hf_files import import_tokenizer
from tests.tokenizer.published import SHAPES
from tests.tokenizer.text_helpers import SOURCES

TEXTS = [
    "",
    " ",
    "The cat sat on the mat.",
    "  two  blanks,  then   three",
    "a trailing blank ",
    "tab\tline\nreturn\r\n\n\n\tend",
    "İstanbul ﬁnd ½ a\u0301 Å straße ÉTÉ",
    "漢字 한국어 हिन्दी مرحبا",
    "👩‍👩‍👧 😀\u200b\ufeff",
    "don't they're I'LL 'tis we 've",
    "12345 3.14 1,000,000 x2y3",
    "▁▁ Ġ ##a </w> <0x41> <0xZZ>",
    "\x00\x07 \x7f\xa0",
    "def f(x):\n        return [x] * 2  # !?",
    SOURCES[3][:600],
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {name: make(root / name) for name, make in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_ids_and_text_equal_those_of_transformers(name, published):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(published[name])
    ours = import_tokenizer(published[name])
    assert ours.vocab == len(theirs)
    assert (ours.eot, ours.unknown) == (theirs.eos_token_id, ours.unknown and theirs.unk_token_id)
    for text in TEXTS:
        wanted = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        ids = ours.encode(text)
        assert ids.tolist() == wanted, text
        assert ours.decode(ids) == _decoded(name, theirs, wanted), text


def _decoded(name: str, theirs, ids: list[int]) -> str:
    text = theirs.decode(ids, clean_up_tokenization_spaces=False)
    return text.replace("</w>", " ").strip() if name == "CLIP" else text  # as transformers' CLIPTokenizer does


MESSAGES = {
    "BERT": [
        "tokenizer.json: post_processor puts [CLS], [SEP] around a text",
        "the tokenizer has no end of text (eos_token)",
    ],
    "CLIP": ["tokenizer.json: its decoder leaves the end of a word, '</w>', in texts"],
    "GPT-1": ["the tokenizer has no end of text (eos_token)"],
}


@pytest.mark.parametrize("name", SHAPES)
def test_messages_about_published_tokenizers(name, published):
    messages: list[str] = []
    tokenizer = import_tokenizer(published[name], messages.append)
    wanted = MESSAGES.get(name, [])
    assert len(messages) == len(wanted)
    for message, beginning in zip(messages, wanted, strict=True):
        assert message.startswith(beginning)
    if name in ("Llama 2", "Llama 3", "Mistral (tekken)", "Gemma", "DeepSeek", "BLOOM", "XLM-R", "CLIP"):
        assert tokenizer.document_start == [tokenizer.specials[tokenizer.special_tokens_map["bos_token"]]]
    else:
        assert tokenizer.document_start == []
