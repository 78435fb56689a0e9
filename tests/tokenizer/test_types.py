"""SPEC rows A2, A5, A6 and files as a type: every tokenizer type keeps its promise, here and in `transformers`."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.core.file_hashes import FileHashes
from ingot.tokenizer import trainers
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import Char, load_tokenizer
from ingot.tokenizer.chat import render, stop_ids
from ingot.tokenizer.files import source_digest
from ingot.tokenizer.hf_files import export_tokenizer, import_tokenizer
from ingot.tokenizer.round_trip import counted_bytes
from ingot.tokenizer.settings import SPECIALS
from ingot.tokenizer.train import train
from tests.conftest import DATA
from tests.tokenizer.hf_helpers import CHATML, like_llama, like_qwen
from tests.tokenizer.text_helpers import SOURCES, labelled, settings

SUBWORDS = ("byte-bpe", "sentencepiece-bpe", "end-of-word-bpe", "unigram", "wordpiece")
TEXT = SOURCES[3] + SOURCES[1]
TEXTS = ("The cat sat on the mat.", "", " two  spaces ", "é 😀 漢字 ▁ ##", "I'Ll 1234567 <0x41>")
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.fixture(scope="session")
def types(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    log = EventLog(tmp_path_factory.mktemp("types") / "metrics.jsonl")
    made = {t: train(settings(type=t, vocab=700), labelled(TEXT), Display(quiet=True), log)[0] for t in SUBWORDS}
    made["word"] = train(settings(type="word"), labelled("The cat sat on the mat. The end."), Display(quiet=True), log)[
        0
    ]
    log.close()
    if (DATA / "gpt2-vocab").exists():
        made["gpt2"] = import_tokenizer(DATA / "gpt2-vocab")
    return made


def test_A2_one_id_a_word_and_unknown_words_never_crash(types):
    words = types["word"]
    ids = words.encode("The cat sat")
    assert len(ids) == 3
    assert words.decode(ids) == "The cat sat"
    assert words.decode(words.encode("The dog sat")) == "The <unk> sat"
    assert words.encode("dog")[0] == words.unknown == 0
    assert (words.lossless, words.specials, words.eot, words.template) == (False, {}, None, "")
    assert counted_bytes(words, "The dog", words.encode("The dog")) == len(" The")
    with pytest.raises(UserError, match="a word tokenizer has no special tokens to mark turns with"):
        render(TALK, words)


def test_A2_numbering_is_the_sources(display, log):
    """ "The cat sat" -> 1, 2, 3: 0 is the unknown word."""
    words, _ = train(settings(type="word"), labelled("The cat sat"), display, log)
    assert words.encode("The cat sat").tolist() == [1, 2, 3]


def test_A7_43_characters_against_9_words(display, log):
    """000's sentence: letters need no vocabulary to speak of, and nearly five times the tokens."""
    fox = "The quick brown fox jumps over the lazy dog"
    words, _ = train(settings(type="word"), labelled(fox), display, log)
    assert (len(Char(None).encode(fox)), len(words.encode(fox))) == (43, 9)


def test_A2_source_error_an_unseen_word_can_be_processed(types):
    """000: "what happens when the model encounters a word it has never seen? It simply cannot process it"."""
    assert types["word"].encode("transformer").tolist() == [0]


def test_A2_the_report_says_what_is_lost(display, log):
    text = "a a a a b b b c c d " * 10
    words, report = train(settings(type="word", vocab=3), labelled(text), display, log)
    assert words.vocab == 3
    assert report["unknown_fraction"] == 0.3  # c and d of ten
    assert report["changed_fraction"] == 1.0
    _, report = train(settings(type="word"), labelled("a b c"), display, log)
    assert (report["unknown_fraction"], report["changed_fraction"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", [*SUBWORDS, "gpt2"])
def test_A6_any_text_comes_back(types, name):
    if name not in types:
        pytest.skip("GPT-2's vocabulary is not on this machine")
    tokenizer = types[name]
    assert tokenizer.lossless

    @given(st.text() | st.text("▁#<>/w0x41E9 \n\r\t_|an", max_size=30))
    @hypothesis_settings(max_examples=150, deadline=None)
    def any_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == b"".join(tokenizer.token_bytes(id) for id in ids) == text.encode()
        assert tokenizer.text_bytes(ids) == len(text.encode())
        assert not set(ids.tolist()) & set(tokenizer.specials.values())

    any_text()
    for text in (
        "<0x41>",
        "▁",
        " ▁ ",
        "</w>",
        "a</w> </w",
        "##",
        "###a",
        "a##b",
        "<|end|>",
        "\x00",
        "\U0010ffff",
        "é" * 300,
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", [*SUBWORDS, "word"])
@pytest.mark.parametrize("run", [" ", "\n", "a", "=", "#", "1", "漢", "\r\n "])
def test_long_runs_neither_crash_nor_stall(types, name, run):
    text = run * 30_000 + "x"
    ids = types[name].encode(text)
    assert name == "word" or types[name].decode(ids) == text


@pytest.mark.parametrize("name", SUBWORDS)
def test_every_subword_type_has_the_special_block(types, name):
    tokenizer = types[name]
    assert tokenizer.vocab == 700
    assert tokenizer.specials == {special: 684 + n for n, special in enumerate(SPECIALS)}
    assert (tokenizer.eot, tokenizer.pad, tokenizer.start_ids) == (684, 685, [684])
    ids, mask = render(TALK, tokenizer)
    assert tokenizer.decode(ids) == "<|user|>Why?<|end|><|assistant|>Because.<|end|>"
    assert tokenizer.decode(ids[mask == 1]) == "Because.<|end|>"
    assert stop_ids(tokenizer) == (tokenizer.specials["<|end|>"], 684)


@pytest.mark.parametrize("name", SUBWORDS)
def test_training_twice_gives_the_same_file(types, name, display, log):
    again, _ = train(settings(type=name, vocab=700), labelled(TEXT), display, log)
    assert again.fingerprint == types[name].fingerprint


@pytest.mark.parametrize("name", [*SUBWORDS, "word"])
def test_saved_loaded_and_exported_it_gives_the_same_ids(types, name, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = types[name]
    tokenizer.save(tmp_path / "own.json")
    loaded = load_tokenizer(tmp_path / "own.json")
    assert (loaded.fingerprint, loaded.kind) == (tokenizer.fingerprint, name)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    export_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # a family with a class of its own
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), import_tokenizer(tmp_path)
    assert (again.vocab, again.lossless, again.template) == (tokenizer.vocab, tokenizer.lossless, tokenizer.template)
    for text in (*TEXTS, TEXT):
        ids = tokenizer.encode(text).tolist()
        assert loaded.encode(text).tolist() == again.encode(text).tolist() == ids
        assert theirs(text, split_special_tokens=True).input_ids == ids
        if tokenizer.lossless:
            assert theirs.decode(ids) == text
    if tokenizer.template:
        assert theirs.apply_chat_template(TALK, return_dict=False) == render(TALK, tokenizer)[0].tolist()


def test_transformers_splits_qwen2_its_own_way(types, tmp_path):
    """Beside the config of a Qwen2, AutoTokenizer ignores how a file says to split; the file's own class does not."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = types["unigram"]
    export_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    ids = tokenizer.encode(TEXT).tolist()
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path)(TEXT).input_ids == ids
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids != ids


def test_A6_bytes_stand_for_rare_characters(types):
    for name in ("sentencepiece-bpe", "unigram"):
        tokenizer = types[name]
        assert tokenizer.encode("😀").tolist() == [0xF0, 0x9F, 0x98, 0x80]
        assert tokenizer.token_bytes(0xF0) == b"\xf0"
        assert tokenizer.decode(tokenizer.encode("😀")[:2]) == "�"


def test_unknown_signs_of_a_metaspace_file_are_counted(tmp_path, display, log):
    like_llama(tmp_path)
    _, report = train(settings(type="file", path=str(tmp_path)), labelled("a ▁ b\n", "a b\n"), display, log)
    assert report["changed_fraction"] == 0.5
    assert "unknown_fraction" not in report


def test_a_file_takes_a_template(tmp_path, display, log):
    like_qwen(tmp_path / "in", "")
    (tmp_path / "own.jinja").write_text(CHATML)
    given = {"type": "file", "path": str(tmp_path / "in"), "from": []}
    plain, report = train(settings(**given), [], display, log)
    chat, _ = train(settings(**given, template=str(tmp_path / "own.jinja")), [], display, log)
    assert (plain.template, chat.template) == ("", CHATML)
    assert np.array_equal(plain.encode("abc"), chat.encode("abc"))
    assert plain.fingerprint != chat.fingerprint
    assert "bytes_per_token" not in report
    with pytest.raises(UserError, match="a model does not learn to stop"):  # `<|im_end|>` is not a token
        train(settings(vocab=300, template=str(tmp_path / "own.jinja")), labelled(TEXT), display, log)


def test_a_file_without_a_chat_format_gets_ours(tmp_path, display, log):
    """The special tokens that it lacks follow its vocabulary; what it has (`<|endoftext|>`) stays where it is."""
    from transformers import AutoTokenizer

    like_qwen(tmp_path / "in", "")
    given = {"type": "file", "path": str(tmp_path / "in"), "from": []}
    plain, _ = train(settings(**given), [], display, log)
    turns, _ = train(settings(**given, template="turns"), [], display, log)
    assert turns.vocab == plain.vocab + len(SPECIALS) - 1
    assert {name: turns.specials[name] for name in plain.specials} == plain.specials
    assert (turns.eot, turns.pad, turns.template) == (plain.eot, plain.pad, "turns")
    assert np.array_equal(plain.encode(TEXT), turns.encode(TEXT))
    ids, mask = render(TALK, turns)
    assert turns.decode(ids[mask == 1]) == "Because.<|end|>"
    assert stop_ids(turns)[0] == turns.specials["<|end|>"] >= plain.vocab
    export_tokenizer(turns, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(TALK, return_dict=False) == ids.tolist()
    llama, _ = train(settings(type="file", path=str(like_llama(tmp_path / "l")), template="turns"), [], display, log)
    assert (llama.eot, llama.pad, llama.vocab) == (2, llama.specials["<|pad|>"], 700 + len(SPECIALS))


def test_a_file_may_be_another_stages_tokenizer(types, bpe, tmp_path, display, log):
    for name, tokenizer in (("bpe", bpe), ("word", types["word"])):
        tokenizer.save(tmp_path / name / "tokenizer.json")
    given = {"type": "file", "path": str(tmp_path / "bpe")}
    again, _ = train(settings(**given, template="turns"), [], display, log)
    assert again.fingerprint == bpe.fingerprint
    with pytest.raises(UserError, match="a word tokenizer has no special tokens to mark turns with; remove"):
        train(settings(type="file", path=str(tmp_path / "word"), template="turns"), [], display, log)


def test_the_content_of_files_is_in_the_key(tmp_path):
    hashes = FileHashes(tmp_path / "memo.json")
    one, two = like_qwen(tmp_path / "one"), like_qwen(tmp_path / "two")
    digest = source_digest(settings(type="file", path=str(one)), hashes)
    assert digest == source_digest(settings(type="file", path=str(two)), hashes)
    (two / "tokenizer_config.json").write_text("{}")
    assert digest != source_digest(settings(type="file", path=str(two)), hashes)
    assert source_digest(settings(vocab=400), hashes) is None
    with pytest.raises(UserError, match=r"template: 'x.jinja' does not exist"):
        source_digest(settings(vocab=400, template="x.jinja"), hashes)
    (tmp_path / "x.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(UserError, match=r"template: '.*x.jinja': chat template, line 2: "):
        source_digest(settings(vocab=400, template=str(tmp_path / "x.jinja")), hashes)
    with pytest.raises(UserError, match="no such directory"):
        source_digest(settings(type="file", path=str(tmp_path / "none")), hashes)


@pytest.mark.parametrize("name", SUBWORDS)
def test_too_little_text_is_one_sentence(name, display, log):
    with pytest.raises(UserError, match=r"vocab = 4,096, but 11 bytes of text only give \d+ \(256 bytes"):
        train(settings(type=name, vocab=4096), labelled("low low low"), display, log)
    with pytest.raises(UserError, match="the train split contains no text"):
        train(settings(type=name, vocab=4096), [], display, log)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "wordpiece", "vocab": 400}, r"found 400, expected at least 528 \(256 bytes in two forms"),
        ({"type": "end-of-word-bpe", "vocab": 527}, r"found 527, expected at least 528 \(256 bytes in two forms"),
        ({"type": "unigram"}, "missing; a unigram needs the size of its vocabulary"),
        ({"type": "sentencepiece-bpe", "vocab": 280}, "found 280, expected at least 288"),
        ({"type": "word", "vocab": 1}, "found 1, expected at least 2"),
        ({"type": "file"}, "missing; a file tokenizer needs its directory"),
        ({"type": "file", "path": "x", "vocab": 5}, "the files determine the size"),
        ({"path": "x", "vocab": 400}, "found 'x', but type byte-bpe does not use it"),
        ({"type": "unigram", "vocab": 400, "pattern": "x"}, "type unigram does not use it"),
        ({"type": "word", "template": "turns"}, "type word does not use it"),
        ({"vocab": 400, "template": "other"}, "found .other., expected turns or a Jinja file"),
        ({"vocab": 400, "from": []}, "missing; name the corpus stage to train on"),
    ],
)
def test_settings_refuse_in_one_sentence(values, message):
    with pytest.raises(ValidationError, match=message) as caught:
        settings(**values)
    assert caught.value.error_count() == 1


def test_only_the_commonest_characters_have_pieces():
    text = "ab" * 10_000 + "é"
    assert trainers._alphabet([text], 100) == ["a", "b"]
    assert trainers._alphabet([text], 1) == ["a"]
    assert trainers._alphabet(["aé"], 100) == ["a", "é"]


def test_words_are_counted_in_order_of_their_number(display):
    words, counts = trainers.count_words(["b a b", "c a b"], [{"type": "Whitespace"}], display)
    assert (words, counts.tolist()) == (["b", "a", "c"], [3, 2, 1])
    assert trainers.count_words(["b a b"], [{"type": "Whitespace"}], display, max_words=1)[0] == ["b"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("byte-bpe", [512, 1024]), ("sentencepiece-bpe", [512, 1024]), ("end-of-word-bpe", [1024])],  # alphabet of 512
)
def test_report_and_smaller_vocabularies(name, sizes, display, log):
    """A BPE trained to V holds what training to any smaller V gives."""
    large, report = train(settings(type=name, vocab=1100), labelled(TEXT), display, log)
    small, _ = train(settings(type=name, vocab=sizes[0]), labelled(TEXT), display, log)
    rows = {row["vocab"]: row["bytes_per_token"] for row in report["tradeoff"]}
    assert list(rows) == [*sizes, 1100]
    assert rows[sizes[0]] == pytest.approx(len(TEXT.encode()) / len(small.encode(TEXT)), rel=1e-12)
    assert rows[1100] == pytest.approx(len(TEXT.encode()) / len(large.encode(TEXT)), rel=1e-12)
    assert sorted(rows.values()) == [*rows.values()]
    assert rows[sizes[0]] < rows[1100]


def test_report_by_source_and_by_script(display, log):
    texts = [("english", "the cat sat on the mat\n" * 50), ("russian", "кошка сидит на ковре\n" * 50)]
    _, report = train(settings(vocab=300), texts, display, log)
    assert set(report["by_source"]) == {"english", "russian"}
    assert set(report["by_script"]) == {"Latin", "Cyrillic"}
    assert report["by_script"]["Latin"] == report["by_source"]["english"]
    english = report["by_source"]["english"]
    assert (english["bytes"], english["bytes"] / english["tokens"]) == (23 * 50, english["bytes_per_token"])
    assert english["tokens_per_word"] == english["tokens"] / (6 * 50)
    assert sum(s["bytes"] for s in report["by_source"].values()) == report["sample_bytes"]
