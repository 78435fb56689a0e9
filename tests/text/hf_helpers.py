"""Model directories made by hand: the kinds of tokenizer files that others publish, small."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.text.text_helpers import SOURCES

LINES = SOURCES[3].split("\n")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CHATML = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}"
    "{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"
)


def write(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def like_qwen(directory: Path, template: str = CHATML) -> Path:
    """Byte-level BPE, NFC, ChatML, one added token that is not special, end of turn apart from end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SOURCES, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    write(directory, tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)
    stops = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return directory


def like_llama(directory: Path, template: str = BRACKETS) -> Path:
    """SentencePiece's BPE: metaspace, byte fallback, a space before every text, `<s>` put in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=700, special_tokens=own, max_token_length=12, show_progress=False),
    )
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # as published: the bytes are pieces, not added tokens
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    end = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    names = {"bos_token": "<s>", "eos_token": {**end, "single_word": False}, "unk_token": "<unk>"}
    return write(directory, tokenizer, chat_template=template, **names)


def like_t5(directory: Path) -> Path:
    """Unigram whose special tokens are pieces that cost nothing."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        LINES,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return write(directory, tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def like_bert(directory: Path) -> Path:
    """WordPiece over lower-cased words, with an unknown token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    own = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        SOURCES, trainers.WordPieceTrainer(vocab_size=400, special_tokens=own, show_progress=False)
    )
    return write(directory, tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


MAKERS = {"qwen": like_qwen, "llama": like_llama, "t5": like_t5, "bert": like_bert}
