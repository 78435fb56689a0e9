"""Model directories made by hand: the kinds of tokenizer files that others publish, small."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.text_helpers import SOURCES

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

_EACH = "{% for m in messages %}"
_END = "{% endfor %}"
STOCK: dict[str, tuple[str, list[str], dict[str, str], list[str]]] = {
    "chatml with a default system": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
        + _EACH
        + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
        + _END
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"eos_token": "<|im_end|>"},
        ["{0}<|im_end|>"],
    ),
    "empty thoughts in the prompt": (
        _EACH
        + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        + "{{ m.content + '<|im_end|>\n' }}"
        + _END
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"eos_token": "<|im_end|>"},
        ["{0}<|im_end|>"],
    ),
    "a beginning of text every two turns": (
        _EACH
        + "{% if m.role == 'system' %}{% set before = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
        + "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
        + "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}"
        + _END,
        ["<s>", "</s>"],
        {"bos_token": "<s>", "eos_token": "</s>"},
        [" {0} </s>"],
    ),
    "header ids": (
        _EACH
        + "{% set part = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}"
        + "{% if loop.index0 == 0 %}{% set part = bos_token + part %}{% endif %}{{ part }}"
        + _END
        + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["{0}<|eot_id|>"],
    ),
    "brackets as tokens": (
        "{{ bos_token }}"
        + _EACH
        + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
        + "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
        + "{% else %}{{ raise_exception('Conversation roles must be user and assistant') }}{% endif %}"
        + _END,
        ["<s>", "</s>", "[INST]", "[/INST]"],
        {"bos_token": "<s>", "eos_token": "</s>"},
        [" {0}</s>"],
    ),
    "an assistant called model": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + _EACH
        + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        + "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        + _END
        + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        ["{0}<end_of_turn>"],
    ),
    "a tag for each role": (
        _EACH
        + "{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
        + "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}"
        + _END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        {"eos_token": "<|endoftext|>"},
        [],  # what follows the last turn is gone when another one comes
    ),
    "tags as text": (
        _EACH
        + "\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
        + "{% elif m['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + m['content'] + eos_token }}\n{% endif %}\n"
        + "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
        + _END,
        ["<s>", "</s>"],
        {"bos_token": "<s>", "eos_token": "</s>"},
        ["{0}</s>"],
    ),
    "names and colons": (
        "{{ bos_token }}"
        + _EACH
        + "{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
        + "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}{% endif %}"
        + _END
        + "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        ["<|begin|>", "<|finish|>"],
        {"bos_token": "<|begin|>", "eos_token": "<|finish|>"},
        [" {0}<|finish|>"],
    ),
    "a token for each border": (
        "{{ bos_token }}"
        + _EACH
        + "{{ '<|START_OF_TURN|>' + {'user': '<|USER|>', 'assistant': '<|BOT|>'}[m.role] + m.content.strip() "
        + "+ '<|END_OF_TURN|>' }}"
        + _END
        + "{% if add_generation_prompt %}{{ '<|START_OF_TURN|><|BOT|>' }}{% endif %}",
        ["<BOS>", "<|START_OF_TURN|>", "<|END_OF_TURN|>", "<|USER|>", "<|BOT|>"],
        {"bos_token": "<BOS>", "eos_token": "<|END_OF_TURN|>"},
        ["{0}<|END_OF_TURN|>"],
    ),
}
"""The shapes of template that published models come with: Jinja, special tokens, what these are for, and what is
learned of an answer {0} (nothing: a conversation of several answers is refused)."""


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


def stock(directory: Path, name: str) -> Path:
    """A byte-level BPE with one of the stock templates."""
    return with_specials(directory, *STOCK[name][:3])


def with_specials(directory: Path, template: str, specials: list[str], names: dict[str, str]) -> Path:
    """A byte-level BPE with a template; a beginning of text is also put in front by its own files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(specials)
    if bos := names.get("bos_token"):
        token = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[token])
    return write(directory, tokenizer, chat_template=template, **names)


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
