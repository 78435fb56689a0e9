"""SPEC row A6: SentencePiece's own files, against the sentencepiece package on the same models."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.hf_files import export_tokenizer, import_tokenizer
from ingot.tokenizer.protobuf import content, encode, parse
from tests.tokenizer.hf_helpers import like_llama
from tests.tokenizer.text_helpers import SOURCES

sentencepiece = pytest.importorskip("sentencepiece")

TEXT = "\n".join(SOURCES) + "\nŁódź naïve café Größe привет мир 漢字かな 한국어 ½ ﬁn \n" * 20
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "add_dummy_prefix": True,
    },
    "Gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "▁▁", "▁▁▁▁", "\n\n"],
        "pad_id": 3,
    },
    "T5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    "bpe without bytes": {"model_type": "bpe", "normalization_rule_name": "identity"},
}
NAMES = "<s> </s> <unk> <pad>"
ODD = [
    "",
    " ",
    "   ",
    "▁",
    " ▁ a",
    "a▁",
    "  two  blanks ",
    "tab\tnew\nline\r\n\n\n end ",
    "<0x41> <0xZZ><0x0A>",
    NAMES,
    "👩‍👩‍👧 😀 \U0010ffff",
    "x\u00a0y\u3000z\u200bw\ufeff",
    "aaaaaaaaaaaaaaa" + " " * 31 + "=" * 40,
    "ababababa",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sentencepiece")
    (root / "text").write_text(TEXT)
    for name, options in MODELS.items():
        (root / name).mkdir()
        prefix = str(root / name / "tokenizer")
        train = sentencepiece.SentencePieceTrainer.train
        train(input=str(root / "text"), model_prefix=prefix, vocab_size=1000, minloglevel=2, **options)
    return {name: root / name for name in MODELS}


def strings(seed: int, count: int) -> list[str]:
    """Parts of the text, odd blanks, and characters that no vocabulary has."""
    draw = random.Random(seed)
    signs = [
        " ",
        "  ",
        "\n",
        "\t",
        "▁",
        "<0x41>",
        "a",
        "ab",
        "==",
        "Ł",
        "漢",
        "ﬁ",
        "½",
        "é",
        "😀",
        "ॐ",
        "\x00",
        "\u200b",
    ]
    made = [*ODD]
    while len(made) < count:
        at = draw.randrange(len(TEXT))
        parts = [TEXT[at : at + draw.randint(0, 60)], *draw.choices(signs, k=draw.randint(0, 8))]
        draw.shuffle(parts)
        made.append("".join(parts))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_A6_ids_equal_those_of_sentencepiece(name: str, models: dict[str, Path]) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models[name] / "tokenizer.model"))
    ours = import_tokenizer(models[name])
    assert ours.vocab == len(theirs)
    roles = {"eos_token": theirs.eos_id(), "bos_token": theirs.bos_id(), "pad_token": theirs.pad_id()}
    for role, id in roles.items():
        assert ours.specials.get(ours.special_tokens_map.get(role, ""), -1) == id
    texts = strings(1, 4000)
    ties = 0
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        if ids.tolist() != (wanted := theirs.encode(text)):
            assert MODELS[name]["model_type"] == "unigram", text
            score, best = (sum(map(theirs.get_score, some)) for some in (ids.tolist(), wanted))
            assert score == pytest.approx(best, abs=1e-3), text
            ties += 1
    assert ties <= 4, "segmentations of one probability are rare"
    for text in ("The cat sat on the mat.", "  two  blanks ", "def f(x):\n\n    return 😀"):
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)).replace(" \u2047 ", "<unk>")


@pytest.mark.parametrize("name", MODELS)
def test_A6_what_is_written_gives_the_same_ids(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """In SentencePiece, in transformers, and read again from either file."""
    from transformers import PreTrainedTokenizerFast

    ours = import_tokenizer(models[name])
    assert "tokenizer.model" in {file.name for file in export_tokenizer(ours, tmp_path)}
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "tokenizer.model").write_bytes((tmp_path / "tokenizer.model").read_bytes())
    alone, json = import_tokenizer(tmp_path / "alone"), import_tokenizer(tmp_path)
    assert alone.special_tokens_map == json.special_tokens_map == ours.special_tokens_map
    original = sentencepiece.SentencePieceProcessor(model_file=str(models[name] / "tokenizer.model"))
    for text in strings(2, 500):
        ids = ours.encode(text).tolist()
        assert alone.encode(text).tolist() == json.encode(text).tolist() == ids
        if text != NAMES:  # the library's Unigram reads names of special tokens as pieces
            assert fast(text, add_special_tokens=False, split_special_tokens=True).input_ids == ids
        assert theirs.encode(text) == original.encode(text)


def test_types_that_sentencepiece_cannot_express_are_not_written(bpe: ByteBPE, tmp_path: Path) -> None:
    assert "tokenizer.model" not in {file.name for file in export_tokenizer(bpe, tmp_path / "bytes")}
    words = import_tokenizer(like_llama(tmp_path / "llama"))  # its merges are in another order than of scores
    theirs = [file for file in export_tokenizer(words, tmp_path / "out") if file.name == "tokenizer.model"]
    if theirs:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(theirs[0]))
        assert [processor.encode(text) for text in ODD] == [words.encode(text).tolist() for text in ODD]


def changed(model: bytes, part: int, *fields: tuple[int, int | float | bytes]) -> bytes:
    """The model with more fields in one of its parts; the last one counts."""
    message = parse(model)
    message[part] = [content(message, part) + encode(fields)]
    return encode((number, value) for number, values in message.items() for value in values)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model: b"", "found no pieces"),
        (lambda model: model[:-3], "not a SentencePiece model"),
        (lambda model: b"IQ== 0\nIg== 1\n", r"not a SentencePiece model .*Llama 3's tokenizer.model is a list"),
        (lambda model: changed(model, 2, (3, 3)), "found a model of type word, expected BPE or Unigram"),
        (lambda model: changed(model, 2, (24, 1)), "found treat_whitespace_as_suffix"),
        (lambda model: changed(model, 3, (5, 0)), "found escape_whitespaces = false"),
        (lambda model: changed(model, 3, (9, 1)), "found the field 9 of normalizer_spec, which is not known"),
        (lambda model: changed(model, 5, (2, b"x")), "found a denormalizer"),
        (lambda model: model + encode([(1, encode([(1, b"z"), (3, 5)]))]), "found the piece 'z' of a type"),
        (lambda model: model + encode([(1, encode([(1, b"zz"), (3, 4)]))]), "found the user-defined piece 'zz'"),
        (lambda model: model + encode([(1, encode([(1, "\u0416\u0416".encode())]))]), "a character that is no piece"),
        (lambda model: model + encode([(1, encode([(1, b"the"), (9, 1)]))]), "a piece has the unknown field 9"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    change: Callable[[bytes], bytes], found: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = (models["Llama"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(change(model))
    with pytest.raises(UserError, match=found) as caught:
        import_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.model") in str(caught.value)


def test_a_class_that_changes_ids_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes((models["T5"] / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5TokenizerFast"}')
    assert import_tokenizer(tmp_path).document_start == []
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false, "add_prefix_space": true, "what": 1}')
    messages: list[str] = []
    import_tokenizer(tmp_path, messages.append)
    assert [message.split(":")[1].split()[0] for message in messages] == ["legacy", "not"]
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    with pytest.raises(UserError, match="add_prefix_space = false contradicts"):
        import_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(
        UserError, match=r"found the class XLMRobertaTokenizer in tokenizer_config\.json, expected Llama"
    ):
        import_tokenizer(tmp_path)
