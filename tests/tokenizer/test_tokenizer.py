"""SPEC row A1, byte-level BPE, and the settings of a tokenizer stage."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.settings import canonical, settings_tree
from ingot.tokenizer.byte_bpe import ByteBPE, Char, load_tokenizer
from ingot.tokenizer.round_trip import counted_bytes
from ingot.tokenizer.settings import PATTERN, SPECIALS, TokensSettings
from ingot.tokenizer.train import sample_texts, train
from tests.tokenizer.text_helpers import SOURCES, labelled, settings

SHAKESPEARE = Path(__file__).parents[3] / "shared/data/tinyshakespeare/input.txt"


def test_A1_code_points():
    assert Char(None).encode("cat").tolist() == [99, 97, 116]
    assert Char(None).vocab == 1_114_112


def test_A1_corpus_alphabet_is_in_code_point_order():
    tokenizer = Char("cat é€😀")
    assert tokenizer.encode(" act").tolist() == [0, 1, 2, 3]
    assert (tokenizer.vocab, tokenizer.eot, tokenizer.specials) == (7, None, {})
    assert tokenizer.decode(tokenizer.encode("é€😀 cat")) == "é€😀 cat"
    assert tokenizer.text_bytes(tokenizer.encode("é€😀a")) == len("é€😀a".encode())
    assert tokenizer.token_bytes(6) == "😀".encode()


def test_A1_unseen_character_is_one_sentence():
    with pytest.raises(UserError, match=r"character 'z' \(U\+007A\) at position 2 is not one of the 3 characters"):
        Char("act").encode("caz")


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tinyshakespeare is not on this machine")
def test_A1_tinyshakespeare(display, log):
    text = SHAKESPEARE.read_text(encoding="utf-8")
    tokenizer, report = train(settings(type="char"), labelled(text[:1_003_854]), display, log)
    assert tokenizer.vocab == report["vocab"] == 65
    ids = tokenizer.encode(text)
    assert len(ids) == 1_115_394
    assert tokenizer.decode(ids) == text


@given(st.text())
@hypothesis_settings(max_examples=60, deadline=None)
def test_A1_A4_bpe_and_code_points_are_lossless_on_any_text(bpe, text):
    for tokenizer in (bpe, Char(None)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.text_bytes(ids) == len(text.encode())


def test_special_strings_in_text_are_text(bpe):
    text = "before<|endoftext|><|end|><|user|>after"
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert ids.max() < min(bpe.specials.values())


def test_special_block_ends_the_vocabulary(bpe):
    assert bpe.vocab == 600
    assert len(SPECIALS) == 16
    assert list(bpe.specials.values()) == list(range(584, 600))
    assert bpe.eot == 584
    assert bpe.token_bytes(584) == b"<|endoftext|>"
    assert bpe.decode([584, 65, 590]) == "<|endoftext|>A<|end|>"


def test_half_a_character_decodes_to_a_replacement(bpe):
    assert bpe.decode([0xE2, 0x82]) == "�"
    assert bpe.decode_bytes([0xE2, 0x82]) == b"\xe2\x82"


@pytest.mark.parametrize("run", [" ", "\n", " \n", "a", "=", "1", "\u3000", "\r\n"])
def test_long_runs_neither_crash_nor_stall(bpe, run):
    text = run * 200_000 + "x"
    assert bpe.decode(bpe.encode(text)) == text


def test_training_survives_a_megabyte_of_spaces(display, log):
    train(settings(vocab=600), labelled(*SOURCES, " " * 1_000_000 + "x"), display, log)


def test_batches_do_not_depend_on_threads(bpe):
    texts = [line for source in SOURCES for line in source.splitlines()][:500]
    one, three = bpe.encode_batch(texts, 1), bpe.encode_batch(texts, 3)
    assert len(one) == len(three) == 500
    assert all(np.array_equal(a, b) and a.dtype == np.uint32 for a, b in zip(one, three, strict=True))


def test_training_is_deterministic_and_order_free(bpe, display, log):
    again, report = train(settings(vocab=600), labelled(*SOURCES[::-1]), display, log)
    assert again.fingerprint == bpe.fingerprint
    assert report["bytes_per_token"] > 1.5
    assert len(report["longest_tokens"]) == 10
    assert 0 <= report["unused_ids"] < 584


@pytest.mark.parametrize("make", [lambda bpe: bpe, lambda bpe: Char("abc"), lambda bpe: Char(None)])
def test_saved_and_loaded_is_the_same(bpe, make, tmp_path):
    tokenizer = make(bpe)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.vocab, loaded.specials) == (tokenizer.kind, tokenizer.vocab, tokenizer.specials)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode("cab").tolist() == tokenizer.encode("cab").tolist()


def test_fingerprint_covers_type_pattern_and_tokens(bpe):
    others = [
        ByteBPE(bpe.tokens, PATTERN + "|.", bpe.template),
        ByteBPE(bpe.tokens[:-1], bpe.pattern, bpe.template),
        ByteBPE([*bpe.tokens[:-2], bpe.tokens[-1], bpe.tokens[-2]], bpe.pattern, bpe.template),
        Char("ab"),
        Char("ac"),
        Char(None),
    ]
    assert len({bpe.fingerprint, *(t.fingerprint for t in others)}) == 7


def test_changed_tokenizer_file_is_refused(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe.save(path)
    data = json.loads(path.read_text())
    data["tokens"][300] = b"something else".hex()
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="the file was changed"):
        load_tokenizer(path)
    path.write_text('{"format": "ingot-tokenizer", "version": 1, "type": "magic"}')
    with pytest.raises(UserError, match="found type 'magic' without 'library', expected both"):
        load_tokenizer(path)
    path.write_text('{"format": "ingot-tokenizer", "version": 1}')
    with pytest.raises(UserError, match="found type None without 'type'"):
        load_tokenizer(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="found list, expected ingot-tokenizer 1"):
        load_tokenizer(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not a tokenizer file"):
        load_tokenizer(path)
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "none.json")


def test_too_little_text_names_what_was_reached(display, log):
    with pytest.raises(UserError, match=r"vocab = 4,096, but 11 bytes of text only give 2\d\d"):
        train(settings(vocab=4096), labelled("low low low"), display, log)
    for kind in ({"vocab": 300}, {"type": "char"}):
        with pytest.raises(UserError, match="no text"):
            train(settings(**kind), [], display, log)


@pytest.mark.parametrize("pattern", ["(", r"\p{L}+"])
def test_pattern_that_is_invalid_or_skips_text(pattern, display, log):
    with pytest.raises(UserError, match="tokenizer pattern"):
        train(settings(vocab=280, pattern=pattern), labelled(*SOURCES), display, log)


def test_ids_must_spell_all_of_a_text(bpe):
    with pytest.raises(UserError, match="ids encode 3 of 4 bytes"):
        counted_bytes(bpe, "abcd", bpe.encode("abc"))


def test_sample_is_even_bounded_and_independent_of_order():
    texts = [f"document {n} " * 10 for n in range(1000)]
    sample = [text for _, text in sample_texts(labelled(*texts), 20_000)]
    assert 0.9 * 20_000 < sum(map(len, sample)) <= 20_000
    numbers = [int(text.split()[1]) for text in sample]
    assert numbers == sorted(numbers)
    assert 0.35 < np.mean(np.array(numbers) < 500) < 0.65
    shuffled = random.Random(1).sample(texts, 1000)
    assert sorted(sample_texts(labelled(*shuffled), 20_000)) == sorted(labelled(*sample))
    assert sample_texts(labelled(*texts), 10**9) == labelled(*texts)


def test_sample_of_one_long_document_is_not_empty():
    sample = sample_texts(labelled("".join(map(str, range(100_000)))), 1000)
    assert 500 <= sum(len(text) for _, text in sample) <= 1000


def test_settings_from_is_a_name_or_a_list():
    assert settings(vocab=4096).source == ["clean"]
    both = settings(**{"from": ["clean", "chat"], "vocab": 4096})
    assert both.source == ["clean", "chat"]
    assert settings_tree(both)["from"] == ["clean", "chat"]
    assert type(both).model_validate(settings_tree(both)) == both


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab": 100}, r"found 100, expected at least 272 \(256 bytes \+ 16 special tokens\)"),
        ({}, "missing; a byte-bpe needs"),
        ({"type": "char", "vocab": 65}, "found 65, but a char vocabulary is as large as its alphabet"),
        ({"type": "char", "pattern": "x"}, "type char does not use it"),
        ({"vocab": 4096, "alphabet": "unicode"}, "type byte-bpe does not use it"),
        ({"vocab": 4096, "sample_bytes": 2**31}, "less than"),
    ],
)
def test_settings_refuse_in_one_sentence(values, message):
    with pytest.raises(ValidationError, match=message) as caught:
        settings(**values)
    assert caught.value.error_count() == 1


def test_workers_are_not_part_of_the_key():
    one = TokensSettings(corpus="clean", tokenizer="bpe", workers=1)
    assert canonical(one) == {"corpus": "clean", "tokenizer": "bpe"}
