"""Tokenizer files: ours read by `transformers`, and theirs read by us, give the same ids."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import rustbpe
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import ByteBPE, Char, load_tokenizer
from ingot.tokenizer.hf_files import export_tokenizer, import_tokenizer, merges_of, tokenizer_files
from tests.conftest import DATA
from tests.tokenizer.hf_helpers import MAKERS, like_bert, like_llama, like_qwen, like_t5
from tests.tokenizer.text_helpers import SOURCES

GPT2 = DATA / "gpt2-vocab"
needs_gpt2 = pytest.mark.skipif(not GPT2.exists(), reason="GPT-2's vocabulary is not on this machine")
SENTENCE = "The cat sat on the mat."
TEXTS = [
    SENTENCE,
    "",
    " two  spaces ",
    "é 😀 漢字 한국어",
    "def f(x):\n    return x\n\n\n\tx",
    "I'Ll DON'T 1234567",
    "<0x41>#_",
]


def transformers_tokenizer(directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def same_ids(ours: Tokenizer, theirs, text: str) -> None:
    wanted = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode(text).tolist() == wanted


@needs_gpt2
def test_A4_gpt2s_own_vocabulary(tmp_path):
    tokenizer = import_tokenizer(GPT2)
    assert tokenizer.encode(SENTENCE).tolist() == [464, 3797, 3332, 319, 262, 2603, 13]
    assert (tokenizer.vocab, tokenizer.eot, tokenizer.specials) == (50_257, 50_256, {"<|endoftext|>": 50_256})
    assert (tokenizer.pad, tokenizer.start_ids, tokenizer.lossless) == (50_256, [50_256], True)
    assert 50_256 not in tokenizer.encode("<|endoftext|>")
    export_tokenizer(tokenizer, tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    assert (theirs.eos_token_id, len(theirs)) == (50_256, 50_257)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert theirs(text).input_ids == tokenizer.encode(text).tolist()


@needs_gpt2
def test_C5_source_error_pad_id_zero_is_an_exclamation_mark():
    """In GPT-2's vocabulary; padding is its end of text, and has no label either way."""
    tokenizer = import_tokenizer(GPT2)
    assert tokenizer.encode("!").tolist() == [0]
    assert tokenizer.pad == 50_256


@needs_gpt2
def test_A4_gpt2_agrees_with_tiktoken():
    """tiktoken's own reading of the same two files: another program, another algorithm."""
    from tiktoken import Encoding
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(str(GPT2 / "vocab.bpe"), str(GPT2 / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    oracle = Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    tokenizer = import_tokenizer(GPT2)
    for text in [*TEXTS, *SOURCES[:2]]:
        assert tokenizer.encode(text).tolist() == oracle.encode_ordinary(text)


def test_A4_exported_byte_bpe_gives_the_same_ids(bpe, tmp_path):
    export_tokenizer(bpe, tmp_path)
    theirs, again = transformers_tokenizer(tmp_path), import_tokenizer(tmp_path)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (bpe.eot, bpe.pad, bpe.vocab)
    assert (again.vocab, again.eot, again.pad, again.specials) == (bpe.vocab, bpe.eot, bpe.pad, bpe.specials)
    assert (again.lossless, again.template) == (True, "turns")

    @given(st.text())
    @hypothesis_settings(max_examples=100, deadline=None)
    def any_text(text: str) -> None:
        ids = bpe.encode(text).tolist()
        assert theirs(text, split_special_tokens=True).input_ids == ids
        assert again.encode(text).tolist() == ids
        assert again.decode(ids) == text

    any_text()
    for text in [*TEXTS, *SOURCES]:
        same_ids(bpe, theirs, text)
        assert again.decode(bpe.encode(text)) == text


def test_a_pattern_that_others_do_not_read_is_refused_before_anything_is_written(bpe, tmp_path):
    odd = copy.copy(bpe)
    odd.pattern = "(?s:.{1,5})"
    with pytest.raises(UserError, match=r"export: tokenizer\.json: .*; train the tokenizer with another pattern"):
        export_tokenizer(odd, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
def test_A4_tokens_named_beside_a_vocabulary_are_its_own(bpe, tmp_path, where, prefix):
    """GPT-2's two files with tokens in one of the places where they are named, against transformers."""
    (exported, *_) = export_tokenizer(bpe, tmp_path / "own")
    model = json.loads(exported.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    names = {"<|mark|>": len(model["vocab"]), "<|other|>": len(model["vocab"]) + 1}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": prefix, "eos_token": "<|mark|>"}
    config |= {"bos_token": "<|mark|>", "unk_token": "<|mark|>", "additional_special_tokens": ["<|other|>"]}
    if where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps(names))
    else:
        plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        config["added_tokens_decoder"] = {str(id): {"content": name, **plain} for name, id in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = import_tokenizer(tmp_path), transformers_tokenizer(tmp_path)
    assert ours.vocab == len(theirs) == len(model["vocab"]) + 2
    assert ours.specials == names
    for text in ("Hello world", " two  blanks", "x"):
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]


def test_listed_pairs_and_spelled_tokens_merge_alike():
    """Few letters and many merges: overlaps everywhere. The library joins pairs, tiktoken whatever spells a token."""
    draw = random.Random(0)
    for seed in range(30):
        letters = "ab" if seed % 2 else "abc"
        texts = ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(20)]
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), 256 + draw.randint(3, 60), pattern="[a-c]+|.")
        tokens = [bytes(t) for t, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
        ours = ByteBPE(tokens, "[a-c]+|.")
        merges = [[a.decode(), b.decode()] for a, b in merges_of(tokens)]
        assert [a + b for a, b in merges_of(tokens)] == tokens[256:]
        vocab = {token.decode(): n for n, token in enumerate(tokens) if n >= 256 or 97 <= token[0] < 100}
        library = Library.from_str(
            json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": merges}})
        )
        for _ in range(100):
            text = "".join(draw.choices(letters, k=draw.randint(1, 30)))
            assert ours.encode(text).tolist() == library.encode(text).ids


def test_exported_characters_give_the_same_ids(tmp_path):
    tokenizer = Char("".join(sorted(set("".join(SOURCES) + " é\r\n😀"))))
    export_tokenizer(tokenizer, tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    for text in [SOURCES[0], "é\r\n😀  ", ""]:
        assert theirs(text).input_ids == tokenizer.encode(text).tolist()
        assert theirs.decode(tokenizer.encode(text).tolist()) == text
    with pytest.raises(UserError, match=r'code points cannot be written as tokenizer.json; .* alphabet = "corpus"'):
        export_tokenizer(Char(None), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", MAKERS)
def test_imported_files_give_their_own_ids_and_survive_export(name, tmp_path):
    source = MAKERS[name](tmp_path / "in")
    ours = import_tokenizer(source)
    export_tokenizer(ours, tmp_path / "out")
    theirs, exported, again = (
        *map(transformers_tokenizer, (source, tmp_path / "out")),
        import_tokenizer(tmp_path / "out"),
    )
    assert again.definition() | {"stops": []} == ours.definition() | {"stops": []}
    for text in [*TEXTS, SOURCES[0]]:
        same_ids(ours, theirs, text)
        same_ids(ours, exported, text)
    ours.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.fingerprint, loaded.kind, loaded.vocab) == (ours.fingerprint, "file", len(theirs))
    assert loaded.encode(SENTENCE).tolist() == ours.encode(SENTENCE).tolist()


def _parts(directory: Path) -> dict[str, Any]:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    merges = {"merges": [tuple(pair) for pair in model["merges"]]} if "merges" in model else {}
    vocab = model["vocab"]
    return {"vocab": [tuple(v) for v in vocab] if isinstance(vocab, list) else vocab, **merges}


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("LlamaTokenizer", like_llama),
        ("GemmaTokenizer", like_llama),
        ("GPT2Tokenizer", like_qwen),
        ("Qwen2Tokenizer", like_qwen),
        ("BertTokenizer", like_bert),
        ("T5Tokenizer", like_t5),
    ],
)
def test_the_families_of_transformers_give_their_own_ids(family, make, tmp_path):
    """How a family normalises, splits and decodes is written by `transformers` itself; only vocabularies are ours."""
    import transformers

    theirs = getattr(transformers, family)(**_parts(make(tmp_path / "made")))
    theirs.save_pretrained(tmp_path / family)
    ours = import_tokenizer(tmp_path / family)
    assert ours.vocab == len(theirs)
    assert ours.eot == theirs.eos_token_id
    for text in (*TEXTS, "a\u0301 ﬁ ½ İ", SOURCES[3]):
        same_ids(ours, theirs, text)


def test_special_tokens_span_what_they_spell_and_no_blanks_beside_it(tmp_path):
    """Those that take blanks along span their mark alone, the unknown one the text that it stands for."""
    like_bert(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = [{**t, "rstrip": t["content"] == "[SEP]"} for t in data["added_tokens"]]
    path.write_text(json.dumps(data))
    tokenizer = import_tokenizer(tmp_path)
    mark = tokenizer.placeholders["[SEP]"]
    (ids, spans), *_ = tokenizer.encode_with_specials([f"漢 {mark}   the"])
    found = {int(id): span.tolist() for id, span in zip(ids, spans, strict=True)}
    assert found[tokenizer.specials["[UNK]"]] == [0, 1]
    assert found[tokenizer.specials["[SEP]"]] == [2, 2 + len(mark)]


@pytest.mark.parametrize("name", MAKERS)
def test_names_of_special_tokens_in_text_are_text(name, tmp_path):
    """Unigram's vocabulary holds `</s>` as a piece that costs nothing: the library itself makes it from text."""
    ours = import_tokenizer(MAKERS[name](tmp_path))
    for special in ours.specials:
        ids = set(ours.encode(f"a {special} b{special}{special}").tolist())
        assert not ids & {id for id in ours.specials.values() if id != ours.unknown}


def test_the_library_would_make_a_special_token_of_text(tmp_path):
    """The control of the test above."""
    like_t5(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    assert library.token_to_id("</s>") in library.encode("a </s> b").ids


def test_what_special_tokens_are_for(tmp_path):
    llama, qwen = import_tokenizer(like_llama(tmp_path / "l")), import_tokenizer(like_qwen(tmp_path / "q"))
    assert (llama.start_ids, llama.eot, llama.pad, llama.unknown, llama.stops) == ([1], 2, 2, None, ())
    end, text_end = qwen.specials["<|im_end|>"], qwen.specials["<|endoftext|>"]
    assert (qwen.start_ids, qwen.eot, qwen.pad, qwen.stops) == ([end], end, text_end, (text_end, end))
    assert "<think>" not in qwen.specials
    assert qwen.decode(qwen.encode("a<think>b")) == "a<think>b"


def test_metaspace_decodes_with_and_without_its_first_space(tmp_path):
    llama = import_tokenizer(like_llama(tmp_path))
    ids = llama.encode("a text \xff\n")
    assert llama.decode(ids) == "a text \xff\n"
    assert llama.decode_bytes(ids) == " a text \xff\n".encode()
    assert b"".join(llama.token_bytes(id) for id in ids) == llama.decode_bytes(ids)
    assert not llama.lossless


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "found none of them, expected tokenizer.json, encoder.json and vocab.bpe"),
        ({"tokenizer.model": ""}, r"tokenizer.model: not a SentencePiece model \(found no pieces\)"),
        ({"sentencepiece.bpe.model": ""}, r"found sentencepiece.bpe.model \(a SentencePiece model whose ids change"),
        ({"tokenizer.pkl": ""}, "found tokenizer.pkl .a pickle, which would run code"),
        ({"vocab.txt": "a"}, "found vocab.txt"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not JSON"),
        ({"tokenizer.json": "[]"}, "found a list, expected a JSON object"),
        ({"tokenizer.json": "{}"}, "found no model, expected"),
        ({"tokenizer.json": '{"model": {"a": 1}}'}, "the tokenizers library cannot read it"),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json: not JSON .*recursion"),
        ({"tokenizer.json": '{"model": {}}', "tokenizer_config.json": '{"a":' * 100_000}, "config.json: not JSON"),
        ({"tokenizer.json": '{"model": {"type": "Magic", "vocab": {}}}'}, "model: found type 'Magic', expected BPE"),
        (
            {"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'},
            "the tokenizers library cannot read it",
        ),
        ({"tokenizer.json": '{"model": {"type": "BPE", "merges": []}}'}, "expected the format of the tokenizers"),
        (
            {
                "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, '
                '"added_tokens": [{"id": 7, "content": "<x>", "special": true, "single_word": false, '
                '"lstrip": false, "rstrip": false, "normalized": false}]}'
            },
            "token '<x>' has id 7, expected 1 .ids of added tokens follow the vocabulary",
        ),
        ({"encoder.json": '{"a": 1}', "vocab.bpe": ""}, "the ids of 1 tokens are not 0 to 0"),
        ({"encoder.json": '{"a": 0}', "vocab.bpe": "#version\na b\n"}, "line 2: found 'a b', expected two tokens"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "has no token for 255 of the 256 bytes"),
        (
            {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer"}'},
            "of a CLIPTokenizer, expected GPT-2's",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        import_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_end_token_without_an_id_and_a_missing_directory(tmp_path):
    like_qwen(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|none|>"}')
    with pytest.raises(UserError, match=r"eos_token is '<\|none\|>', which has no id"):
        import_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        import_tokenizer(tmp_path / "none")
    assert tokenizer_files(tmp_path / "tokenizer.json")[0].name == "tokenizer.json"


def test_an_end_that_is_no_id_is_refused_by_its_file(tmp_path):
    directory = like_qwen(tmp_path / "qwen")
    for found in ("2", [2, "3"], 2.0):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
        with pytest.raises(
            UserError, match=r"generation_config.json: eos_token_id: found .*, expected an id or a list"
        ):
            import_tokenizer(directory)


def test_text_that_is_not_unicode_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="surrogates not allowed at position 1"):
        import_tokenizer(like_qwen(tmp_path)).encode("a\ud800")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2", "qwen3"])
def test_beside_a_models_config_the_ids_are_the_same(bpe, tmp_path, family):
    """`transformers` chooses a class by the model's family; ours must not get another family's splitting."""
    export_tokenizer(bpe, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers_tokenizer(tmp_path)
    for text in TEXTS:
        same_ids(bpe, theirs, text)
