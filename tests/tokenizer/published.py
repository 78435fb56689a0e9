"""The tokenizers of published model families: their parts as published, with small vocabularies trained here."""

import base64
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.hf_helpers import LINES, write

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
CLIP = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
CHARSMAP = base64.b64encode(struct.pack("<I", 1024) + bytes(1024)).decode()
"""A precompiled normalizer that maps nothing."""

Pre = pre_tokenizers.PreTokenizer


def _pattern(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert=invert)


def _letters(add_prefix_space: bool = False, use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def _byte_level(
    directory: Path,
    steps: list[Any],
    specials: list[str],
    *,
    front: str = "",
    normalizer: Any = None,
    plain: tuple[str, ...] = (),
    normalized: bool = False,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A byte-level BPE with added tokens after its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(text, normalized=normalized) for text in plain])
    if front:
        template = processors.TemplateProcessing(
            single=f"{front} $A", special_tokens=[(front, tokenizer.token_to_id(front))]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])
    write(directory, tokenizer, **config)
    if model:
        _change(directory, lambda data: data["model"].update(model))
    return directory


def _sentencepiece(directory: Path, gemma: bool, **config: Any) -> Path:
    """A BPE with byte fallback: of Llama 2 with a blank before a text, of Gemma without."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spell = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = spell if gemma else normalizers.Sequence([normalizers.Prepend("▁"), spell])
    names = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    runs = ["\n\n", "▁▁", "▁▁▁"] if gemma else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*names, *pieces, *runs], max_token_length=12, show_progress=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no piece of two words, as SentencePiece's
    tokenizer.train_from_iterator(LINES, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if gemma else [*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    bos = "<bos>" if gemma else "<s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    write(directory, tokenizer, **config)

    def as_published(data: dict[str, Any]) -> None:
        kept = [token for token in data["added_tokens"] if token["content"] not in pieces]
        data["added_tokens"] = [{**token, "special": token["content"] in names} for token in kept]
        data["pre_tokenizer"] = data["pre_tokenizer"] if gemma else None

    _change(directory, as_published)
    return directory


def _unigram(directory: Path, single: str, names: list[str], **config: Any) -> Path:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    around = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>") if name in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    write(directory, tokenizer, **config)
    precompiled = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    _change(
        directory,
        lambda data: data.update(normalizer={"type": "Sequence", "normalizers": [precompiled, data["normalizer"]]}),
    )
    return directory


def bert(directory: Path) -> Path:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return write(directory, tokenizer, do_lower_case=True, tokenize_chinese_chars=True, mask_token="[MASK]", **config)


def clip(directory: Path) -> Path:
    names = ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(unk_token=names[1], end_of_word_suffix="</w>", continuing_subword_prefix=""))
    spell = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(spell)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_pattern(CLIP, "removed", True), _letters(use_regex=True)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, end_of_word_suffix="</w>", initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*LINES, *(letter for letter in map(chr, range(256)))], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    start, end = ((name, tokenizer.get_vocab()[name]) for name in names)
    tokenizer.post_processor = processors.RobertaProcessing(end, start, trim_offsets=False, add_prefix_space=False)
    config = {"bos_token": names[0], "eos_token": names[1], "unk_token": names[1], "pad_token": names[1]}
    return write(directory, tokenizer, do_lower_case=True, errors="replace", **config)


def gpt1(directory: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return write(directory, tokenizer, unk_token="<unk>")


def _change(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


_END = "<|endoftext|>"
_CHATML = [_END, "<|im_start|>", "<|im_end|>"]
_SEQUENCE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_BLANKS = tuple(" " * n for n in range(8, 1, -1))
_SAME = {"bos_token": _END, "eos_token": _END, "unk_token": _END}

SHAPES: dict[str, Callable[[Path], Path]] = {
    "GPT-2": partial(_byte_level, steps=[_letters(use_regex=True)], specials=[_END], add_prefix_space=False, **_SAME),
    "Llama 2": partial(
        _sentencepiece,
        gemma=False,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        add_eos_token=False,
        legacy=False,
        sp_model_kwargs={},
    ),
    "Llama 3": partial(
        _byte_level,
        steps=[_pattern(LLAMA3), _letters()],
        specials=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"],
        front="<|begin_of_text|>",
        model={"ignore_merges": True},
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        clean_up_tokenization_spaces=True,
    ),
    "Mistral (tekken)": partial(
        _byte_level,
        steps=[_pattern(TEKKEN), _letters()],
        specials=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        front="<s>",
        model={"ignore_merges": True},
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ),
    "Qwen 2": partial(
        _byte_level,
        steps=[_pattern(QWEN), _letters()],
        specials=_CHATML,
        normalizer=normalizers.NFC(),
        add_prefix_space=False,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token=_END,
        errors="replace",
        split_special_tokens=False,
    ),
    "Qwen 3": partial(
        _byte_level,
        steps=[_pattern(QWEN), _letters()],
        specials=_CHATML,
        normalizer=normalizers.NFC(),
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        add_bos_token=False,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token=_END,
    ),
    "Gemma": partial(
        _sentencepiece, gemma=True, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ),
    "Phi": partial(
        _byte_level,
        steps=[_letters(use_regex=True)],
        specials=[_END],
        plain=(*_BLANKS, "\t\t\t", "\t\t"),
        add_prefix_space=False,
        **_SAME,
    ),
    "SmolLM": partial(
        _byte_level, steps=[pre_tokenizers.Digits(True), _letters(use_regex=True)], specials=_CHATML, **_SAME
    ),
    "DeepSeek": partial(
        _byte_level,
        steps=[_pattern(r"\p{N}{1,3}"), _pattern("[一-龥぀-ゟ゠-ヿ]+"), _pattern(LLAMA3), _letters()],
        specials=[*_SEQUENCE, "<｜User｜>", "<｜Assistant｜>"],
        normalizer=normalizers.Sequence([]),
        front=_SEQUENCE[0],
        bos_token=_SEQUENCE[0],
        eos_token=_SEQUENCE[1],
        add_bos_token=True,
        add_eos_token=False,
    ),
    "BERT": bert,
    "T5": partial(
        _unigram,
        single="$A </s>",
        names=["<pad>", "</s>", "<unk>", "<extra_id_0>"],
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_ids=1,
        additional_special_tokens=["<extra_id_0>"],
    ),
    "CLIP": clip,
    "GPT-1": gpt1,
    "BLOOM": partial(
        _byte_level,
        steps=[_pattern(BLOOM), _letters()],
        specials=["<unk>", "<s>", "</s>", "<pad>"],
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        add_prefix_space=False,
    ),
    "Falcon": partial(
        _byte_level,
        steps=[
            pre_tokenizers.Punctuation("contiguous"),
            _letters(use_regex=True),
            pre_tokenizers.Digits(False),
            _pattern("[0-9][0-9][0-9]"),
        ],
        specials=[">>TITLE<<", ">>ABSTRACT<<", _END],
        eos_token=_END,
    ),
    "StarCoder": partial(
        _byte_level,
        steps=[pre_tokenizers.Digits(True), _letters(use_regex=True)],
        specials=[_END, "<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
        **_SAME,
    ),
    "OLMo": partial(
        _byte_level,
        steps=[_letters(use_regex=True)],
        specials=["<|padding|>", _END],
        normalizer=normalizers.NFC(),
        plain=(*_BLANKS, "|||EMAIL_ADDRESS|||"),
        normalized=True,
        eos_token=_END,
        pad_token="<|padding|>",
    ),
    "Granite": partial(
        _byte_level,
        steps=[pre_tokenizers.Digits(True), _letters(use_regex=True)],
        specials=["<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>"],
        bos_token="<|end_of_text|>",
        eos_token="<|end_of_text|>",
        add_bos_token=False,
        add_prefix_space=False,
    ),
    "XLM-R": partial(
        _unigram,
        single="<s> $A </s>",
        names=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
    ),
}
"""Family -> writes a directory with its tokenizer.json and tokenizer_config.json."""
