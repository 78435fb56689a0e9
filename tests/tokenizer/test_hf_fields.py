"""Every part of a foreign tokenizer's files is used, switched off with a message, or refused by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.hf_files import import_tokenizer
from tests.tokenizer.hf_helpers import LINES, like_bert, like_llama, like_qwen, like_t5, write
from tests.tokenizer.published import SHAPES

Maker = Callable[[Path], Path]
Change = Callable[[dict[str, Any]], Any]
TEXT = "the cat sat on the mat, don't they"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Maker, Path], Path]:
    """Copies the directory that a maker writes; each is made once."""
    made: dict[Maker, Path] = {}

    def to(maker: Maker, directory: Path) -> Path:
        if maker not in made:
            made[maker] = maker(tmp_path_factory.mktemp("made"))
        return Path(shutil.copytree(made[maker], directory, dirs_exist_ok=True))

    return to


def changed(directory: Path, change: Change, file: str = "tokenizer.json") -> Path:
    path = directory / file
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return directory


def read(directory: Path) -> tuple[Tokenizer, str]:
    messages: list[str] = []
    return import_tokenizer(directory, messages.append), "\n".join(messages)


def sub(name: str, **values: Any) -> Change:
    return lambda data: data[name].update(values)


@pytest.mark.parametrize(
    ("maker", "values"),
    [
        (like_qwen, {"dropout": 0.5}),
        (like_llama, {"dropout": 1.0}),
        (like_qwen, {"dropout": 0.01}),
        (like_t5, {"alpha": 0.1, "nbest_size": -1}),
    ],
)
def test_sampling_is_switched_off_and_said(maker, values, tmp_path, copy):
    expected = import_tokenizer(copy(maker, tmp_path / "before"))
    tokenizer, messages = read(changed(copy(maker, tmp_path / "with"), sub("model", **values)))
    for name, value in values.items():
        assert f"model.{name} = {value} is switched off" in messages
    wanted = expected.encode(TEXT).tolist()
    assert all(tokenizer.encode(TEXT).tolist() == wanted for _ in range(20))
    assert tokenizer.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(decoder={"type": "CTC", "pad_token": "<pad>"}), "decoder: found type 'CTC', expected BPED"),
        (lambda d: d.update(decoder={"type": "Sequence", "decoders": [{"type": "Odd"}]}), r"decoder\[0\]: found type"),
        (lambda d: d.update(normalizer={"type": "Reverse"}), "normalizer: found type 'Reverse'"),
        (lambda d: d.update(pre_tokenizer={"type": "Jieba"}), "pre_tokenizer: found type 'Jieba'"),
        (lambda d: d.update(post_processor={"type": "Shuffle"}), "post_processor: found type 'Shuffle'"),
        (sub("model", sampling=0.2), r"model \(BPE\): found the field 'sampling'"),
        (sub("normalizer", form="NFKC"), r"normalizer \(NFC\): found the field 'form'"),
        (sub("decoder", suffix="</w>"), r"decoder \(ByteLevel\): found the field 'suffix'"),
        (lambda d: d.update(vocab_filter=["a"]), "found the field 'vocab_filter'"),
        (lambda d: d["added_tokens"][0].update(alias="x"), "added_tokens, '<.endoftext.>': found the field 'alias'"),
    ],
)
def test_unknown_parts_are_refused_by_name(change, sentence, tmp_path, copy):
    with pytest.raises(UserError, match=sentence):
        import_tokenizer(changed(copy(like_qwen, tmp_path), change))


def test_unknown_fields_that_are_empty_are_no_matter(tmp_path, copy):
    directory = changed(copy(like_qwen, tmp_path), sub("model", sampling=None, cache={}, odd=False))
    assert "".join(import_tokenizer(directory).decode(import_tokenizer(directory).encode(TEXT))) == TEXT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncation", {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
        ("truncation", {"direction": "Left", "max_length": 1, "strategy": "OnlyFirst", "stride": 0}),
        (
            "padding",
            {
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "!",
            },
        ),
    ],
)
def test_texts_keep_their_length(name, value, tmp_path, copy):
    wanted = import_tokenizer(copy(like_qwen, tmp_path)).encode(TEXT).tolist()
    tokenizer, messages = read(changed(tmp_path, lambda data: data.update({name: value})))
    assert f"{name} is switched off" in messages
    assert tokenizer.encode(TEXT).tolist() == wanted


def end_of_word(directory: Path, suffix: str, split: Any, decoder: Any) -> Path:
    tokenizer = Library(models.BPE(unk_token="<unk>", end_of_word_suffix=suffix))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), split
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<eos>"], end_of_word_suffix=suffix, show_progress=False
    )
    tokenizer.train_from_iterator(LINES[:300], trainer)
    if decoder:
        tokenizer.decoder = decoder
    return write(directory, tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("suffix", "split", "decoder"),
    [
        ("</w>", pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("</w>")),
        ("@@", pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("@@")),
        ("</w>", pre_tokenizers.Whitespace(), None),
        ("_", pre_tokenizers.BertPreTokenizer(), decoders.Fuse()),
        ("_", pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("</w>")),
        ("</w>", pre_tokenizers.WhitespaceSplit(), decoders.ByteLevel()),
    ],
)
def test_an_end_of_word_is_a_blank(suffix, split, decoder, tmp_path):
    tokenizer, messages = read(end_of_word(tmp_path, suffix, split, decoder))
    ids = tokenizer.encode("the text The")
    assert tokenizer.decode(ids) == "the text the"
    assert tokenizer.decode_bytes(ids) == b"the text the "
    assert tokenizer.text_bytes(ids) == len("the text the ")
    assert bool(messages) == (not isinstance(decoder, decoders.BPEDecoder) or decoder.suffix != suffix)
    assert not tokenizer.lossless


@pytest.mark.parametrize(
    ("maker", "decoded"),
    [(like_qwen, TEXT), (like_t5, TEXT), (like_bert, "the cat sat on the mat , don ' t they")],
)
def test_a_missing_decoder_is_the_inverse_of_the_other_parts(maker, decoded, tmp_path, copy):
    tokenizer, messages = read(changed(copy(maker, tmp_path), lambda data: data.update(decoder=None)))
    assert "decoder is null; text is decoded by" in messages
    assert tokenizer.decode(tokenizer.encode(TEXT)) == decoded


def test_without_a_decoder_pieces_are_joined_by_blanks_as_in_the_library(tmp_path):
    library = Library(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<e>": 3}, merges=[("a", "b")]))
    library.add_special_tokens(["<e>"])
    tokenizer, messages = read(write(tmp_path, library, eos_token="<e>"))
    assert "pieces are decoded with a blank between them" in messages
    assert tokenizer.decode([0, 2, 1]) == library.decode([0, 2, 1]) == "a ab b"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece("##", cleanup=False), decoders.Fuse(), decoders.Strip()])
def test_a_prefix_inside_words_needs_a_decoder_that_removes_it(decoder, tmp_path):
    library = Library(
        models.BPE(vocab={"a": 0, "##b": 1, "a##b": 2, "ab": 3, "<e>": 4}, merges=[], continuing_subword_prefix="##")
    )
    library.add_special_tokens(["<e>"])
    if decoder:
        library.decoder = decoder
    directory = write(tmp_path, library, eos_token="<e>")
    if decoder is None or isinstance(decoder, decoders.WordPiece):
        tokenizer = import_tokenizer(directory)
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    else:
        with pytest.raises(UserError, match="continuing_subword_prefix is '##', but its decoder does not remove it"):
            import_tokenizer(directory)


@pytest.mark.parametrize(
    ("maker", "config", "sentence"),
    [
        (like_bert, {"do_lower_case": False}, "do_lower_case = false contradicts tokenizer.json, where it is true"),
        (like_bert, {"tokenize_chinese_chars": False}, "tokenize_chinese_chars = false contradicts"),
        (like_qwen, {"add_prefix_space": True}, "add_prefix_space = true contradicts tokenizer.json"),
        (like_llama, {"add_prefix_space": False}, "add_prefix_space = false contradicts tokenizer.json"),
        (like_t5, {"add_prefix_space": False}, "add_prefix_space = false contradicts tokenizer.json"),
        (like_qwen, {"fix_mistral_regex": True}, "fix_mistral_regex replaces the pattern"),
        (like_qwen, {"eos_token": "<|none|>"}, "eos_token is '<.none.>', which has no id"),
        (like_qwen, {"bos_token": {"content": "<s>"}}, "bos_token is '<s>', which has no id"),
    ],
)
def test_settings_that_contradict_the_file_are_refused(maker, config, sentence, tmp_path, copy):
    with pytest.raises(UserError, match=sentence):
        import_tokenizer(changed(copy(maker, tmp_path), lambda data: data.update(config), "tokenizer_config.json"))


@pytest.mark.parametrize(
    ("maker", "config", "message"),
    [
        (like_bert, {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces is not applied"),
        (like_t5, {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces is not applied"),
        (like_qwen, {"clean_up_tokenization_spaces": True}, ""),
        (like_qwen, {"image_token": "<i>", "errors": "strict"}, "tokenizer_config.json: not used: errors, image_token"),
        (like_qwen, {"model_max_length": 4, "legacy": True, "errors": "replace", "image_token": None}, ""),
        (like_qwen, {"pad_token": "[PAD]"}, "pad_token is '[PAD]', which has no id; it is not used"),
        (like_qwen, {"add_eos_token": True, "split_special_tokens": True, "padding_side": "left"}, ""),
    ],
)
def test_settings_without_effect_are_named(maker, config, message, tmp_path, copy):
    _, before = read(copy(maker, tmp_path))
    _, after = read(changed(tmp_path, lambda data: data.update(config), "tokenizer_config.json"))
    assert message in after
    assert bool(message) == (after != before)


THINK = {"content": "<think>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "properties",
    [{"lstrip": True, "rstrip": True}, {"special": True}, {"single_word": True}, {"lstrip": True, "special": False}],
)
def test_properties_of_added_tokens_are_those_of_the_config_as_in_transformers(properties, tmp_path, copy):
    from transformers import PreTrainedTokenizerFast

    id = import_tokenizer(copy(like_qwen, tmp_path)).encode("<think>")[0]
    decoder = {str(id): {**THINK, "special": False, **properties}}
    changed(tmp_path, lambda data: data.update(added_tokens_decoder=decoder), "tokenizer_config.json")
    ours, theirs = import_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("a <think> b", "a<think>b", "  <think>\n\n"):
        wanted = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text).tolist() == wanted


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["<a>", "<b>"]}, "<a>, <b> among the special tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": {"image": "<i>"}}, "<i> among the special tokens"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<think>"]}, "<think> made special, so that texts"),
        ("special_tokens_map.json", {"eos_token": "<|im_start|>"}, "eos_token is '<|im_start|>'; '<|im_end|>' of"),
    ],
)
def test_special_tokens_that_differ_between_files_are_named(file, values, message, tmp_path, copy):
    copy(like_qwen, tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    _, messages = read(changed(tmp_path, lambda data: data.update(values), file))
    assert message in messages


def test_two_ids_of_one_token_are_refused(tmp_path, copy):
    decoder = {"3": {**THINK, "special": False}}
    changed(copy(like_qwen, tmp_path), lambda d: d.update(added_tokens_decoder=decoder), "tokenizer_config.json")
    with pytest.raises(UserError, match=r"added_tokens_decoder gives '<think>' the id 3, tokenizer\.json 6"):
        import_tokenizer(tmp_path)


@pytest.mark.parametrize("eos", ["", None, {"content": ""}, "absent"])
def test_no_end_of_text_is_said(eos, tmp_path, copy):
    copy(like_llama, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config if eos == "absent" else config | {"eos_token": eos})
    )
    tokenizer, messages = read(tmp_path)
    assert tokenizer.eot is None
    assert "the tokenizer has no end of text (eos_token)" in messages
    assert "name one of its tokens as eos_token in tokenizer_config.json" in messages


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("post_processor", "config", "begins"),
    [
        ("its own", {}, True),
        (None, {}, True),
        (LETTERS, {}, True),
        (TEMPLATE, {}, False),
        ("its own", {"add_bos_token": False}, False),
        (None, {"add_bos_token": False}, False),
        (TEMPLATE, {"add_bos_token": True}, True),
        ("its own", {"add_bos_token": True}, True),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": True}, {}, True),
    ],
)
def test_a_text_begins_as_the_files_say(post_processor, config, begins, tmp_path, copy):
    copy(like_llama, tmp_path)
    if isinstance(post_processor, dict):
        post_processor = {"add_prefix_space": False, **post_processor}
        if post_processor["type"] == "TemplateProcessing":
            del post_processor["add_prefix_space"]
    if post_processor != "its own":
        changed(tmp_path, lambda data: data.update(post_processor=post_processor))
    tokenizer = import_tokenizer(changed(tmp_path, lambda data: data.update(config), "tokenizer_config.json"))
    assert (tokenizer.start_ids, tokenizer.document_start) == (([1], [1]) if begins else ([2], []))
    assert tokenizer.special_tokens_map["bos_token"] == "<s>"  # for the chat template, in any case


def test_a_begin_that_is_the_end_is_written_once(tmp_path, copy):
    tokenizer = import_tokenizer(copy(SHAPES["GPT-2"], tmp_path))
    assert (tokenizer.start_ids, tokenizer.document_start) == ([tokenizer.eot], [])


@pytest.mark.parametrize("maker", [like_qwen, like_llama, like_t5, like_bert])
def test_files_from_before_models_had_a_type_are_read(maker, tmp_path, copy):
    expected = import_tokenizer(copy(maker, tmp_path)).encode(TEXT)
    tokenizer, _ = read(changed(tmp_path, lambda data: data["model"].pop("type")))
    assert tokenizer.encode(TEXT).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_of_a_class_are_no_special_tokens_where_they_are_ordinary_text(name, tmp_path, copy):
    """Every config.json of a Llama says bos_token_id = 1 and eos_token_id = 2, whatever its vocabulary is."""
    expected = import_tokenizer(copy(like_qwen, tmp_path)).encode('"!#')
    changed(
        tmp_path, lambda data: [data.pop(role, None) for role in ("eos_token", "pad_token")], "tokenizer_config.json"
    )
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / name).write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}))
    tokenizer, messages = read(tmp_path)
    assert tokenizer.special_tokens_map == {}
    assert tokenizer.encode('"!#').tolist() == expected.tolist()
    assert f"eos_token_id of the model is 2, which is the ordinary text {tokenizer.decode([2])!r}" in messages


def test_ids_of_the_model_name_special_tokens_that_the_tokenizer_does_not(tmp_path, copy):
    tokenizer = import_tokenizer(copy(like_qwen, tmp_path))
    start, end = (tokenizer.specials[name] for name in ("<|endoftext|>", "<|im_end|>"))
    changed(tmp_path, lambda data: data.pop("eos_token"), "tokenizer_config.json")
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": start, "eos_token_id": end}))
    tokenizer = import_tokenizer(tmp_path)
    assert (tokenizer.eot, tokenizer.document_start) == (end, [start])
    changed(tmp_path, lambda data: data.update(bos_token=None), "tokenizer_config.json")  # Qwen's, which begins without
    assert import_tokenizer(tmp_path).document_start == []


def test_padding_with_ordinary_text_leaves_the_text_alone(tmp_path, copy):
    expected = import_tokenizer(copy(like_qwen, tmp_path)).encode("no! way!")
    tokenizer, messages = read(changed(tmp_path, lambda d: d.update(pad_token="!"), "tokenizer_config.json"))
    assert "pad_token is '!', which is ordinary text; it is not used" in messages
    assert tokenizer.encode("no! way!").tolist() == expected.tolist()
    assert "!" not in tokenizer.specials


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("eos_token", ["</s>"], r"eos_token: found \['</s>'\], expected a token"),
        ("bos_token", 1, "bos_token: found 1, expected a token"),
        ("pad_token", {"content": 3}, "pad_token: found .*, expected a token"),
        ("additional_special_tokens", [7], "extra_special_tokens: found 7, expected a token"),
        ("chat_template", 5, "chat_template: found int, expected the text of a template"),
        ("chat_template", {"default": "x"}, "chat_template: found dict, expected the text of a template"),
    ],
)
def test_fields_of_another_type_are_refused_by_name(field, value, sentence, tmp_path, copy):
    with pytest.raises(UserError, match=sentence):
        import_tokenizer(
            changed(copy(like_qwen, tmp_path), lambda d: d.update({field: value}), "tokenizer_config.json")
        )


def test_templates_that_are_not_used_are_named(tmp_path, copy):
    templates = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    tokenizer, messages = read(
        changed(copy(like_qwen, tmp_path), lambda d: d.update(chat_template=templates), "tokenizer_config.json")
    )
    assert tokenizer.template == "b"
    assert "chat_template: not used: tool_use" in messages
    tokenizer, messages = read(changed(tmp_path, lambda d: d["chat_template"].pop(), "tokenizer_config.json"))
    assert tokenizer.template == ""
    assert "chat_template: not used: tool_use" in messages
