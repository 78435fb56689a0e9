"""Settings of the stages `tokenizer` and `tokens`.

One class covers all tokenizer types, so that a setting that the chosen `type` does not use is an error and not ignored.
"""

import contextlib
import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from ingot.core.settings import EXECUTION, Settings, Stage

SPECIALS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    *(f"<|reserved_{n}|>" for n in range(9)),
)
"""The special tokens at the end of every subword vocabulary. Their number is fixed so that a base model can be
fine-tuned on chats without a larger embedding."""
TURNS = "turns"
"""The chat format with these tokens. Any other `template` is the source of a Jinja template; "" is none."""
SPECIAL_TOKENS_MAP = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
"""The roles of `SPECIALS` in Hugging Face's terms."""

BYTES = 256
MIN_VOCAB = {
    "byte-bpe": (BYTES + len(SPECIALS), f"{BYTES} bytes + {len(SPECIALS)} special tokens"),
    "sentencepiece-bpe": (BYTES + len(SPECIALS) + 16, f"{BYTES} bytes, {len(SPECIALS)} special tokens, 16 pieces"),
    "end-of-word-bpe": (2 * BYTES + len(SPECIALS), f"{BYTES} bytes in two forms + {len(SPECIALS)} special tokens"),
    "unigram": (BYTES + len(SPECIALS) + 16, f"{BYTES} bytes, {len(SPECIALS)} special tokens, 16 pieces"),
    "wordpiece": (2 * BYTES + len(SPECIALS), f"{BYTES} bytes in two forms + {len(SPECIALS)} special tokens"),
}
"""Subword type -> its minimum vocabulary size, and what that consists of."""

PATTERN = "|".join(
    (
        r"'(?i:[stdm]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+",  # a word with its marks and at most one symbol or space before it
        r"\p{N}{1,2}",  # two digits: groups of three would fill a small vocabulary with numbers
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",  # symbols with the line end after them
        r"\s{0,64}[\r\n]+",  # blank lines
        r"\s{1,64}(?!\S)",  # indentation without the last space, which belongs to the word
        r"\s",
    )
)
"""Pre-tokenisation pattern, after GPT-4's. Runs of white space are limited to 64 characters because an unbounded run
(a megabyte of spaces) overflows the stack of the backtracking regex engine of rustbpe and tiktoken."""


class TokenizerSettings(Settings):
    """Kind `tokenizer`: train a vocabulary on the train split of corpora, or import one from files."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    type: Literal[
        "byte-bpe", "sentencepiece-bpe", "end-of-word-bpe", "unigram", "wordpiece", "word", "char", "file"
    ] = "byte-bpe"
    """The algorithm. Subword types can encode any text, `word` and `char` cannot; `file` imports a vocabulary."""
    source: Annotated[list[str], Stage("documents")] = Field(default=[], alias="from")
    """Corpus stages to train on, a name or a list (`from` in a recipe). A `file` is only measured on them."""
    vocab: int | None = None
    """Size of a subword vocabulary with special tokens, or maximum number of words of a `word` (default: all)."""
    path: Annotated[Path | None, EXECUTION] = None
    """`file` only: a directory with `tokenizer.json`, GPT-2's two files, or SentencePiece's `tokenizer.model`. Their
    content is part of the key."""
    alphabet: Literal["corpus", "unicode"] = "corpus"
    """`char` only: the characters of the train split, or all Unicode code points."""
    pattern: str = Field(default=PATTERN, min_length=1)
    """`byte-bpe` only: regular expression that splits text before merging. It must match every character."""
    sample_bytes: int = Field(default=100_000_000, gt=0, lt=2**31)
    """UTF-8 bytes of text to train on; a larger corpus is sampled evenly (the trainer counts pairs in 32 bits)."""
    template: str | None = None
    """Chat format: `turns` (`<|role|>content<|end|>`) or a Jinja file NAME.jinja. A `file` has its own by default."""
    date: str | None = None
    """The date in prompts of a Jinja template that writes one, as in 2025-01-31. The clock is never read."""
    enable_thinking: bool | None = None
    """The variable of a Jinja template that switches thinking on or off. Default: not set."""

    @property
    def template_file(self) -> Path | None:
        """The Jinja file in `template`, or None."""
        return None if self.template in (None, TURNS) else Path(str(self.template))

    @property
    def template_variables(self) -> dict[str, Any]:
        """`Tokenizer.template_variables`. `thinking` is the name in the templates of DeepSeek V3.1 and Granite."""
        given = {"date": self.date, "enable_thinking": self.enable_thinking, "thinking": self.enable_thinking}
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("source", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _has_source(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if not value and info.data.get("type", "file") != "file":
            raise ValueError('missing; name the corpus stage to train on, for example from = "clean"')
        return value

    @field_validator("vocab")
    @classmethod
    def _vocab_fits_type(cls, value: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind in MIN_VOCAB:
            smallest, parts = MIN_VOCAB[kind]
            if value is None:
                raise ValueError(f"missing; a {kind} needs the size of its vocabulary, for example vocab = 4096")
            if value < smallest:
                raise ValueError(f"found {value}, expected at least {smallest} ({parts}); set a larger one")
        if kind == "word" and value is not None and value < 2:
            raise ValueError(f"found {value}, expected at least 2 (<unk> and a word); set a larger one")
        if kind == "char" and value is not None:
            raise ValueError(f"found {value}, but a char vocabulary is as large as its alphabet; remove the setting")
        if kind == "file" and value is not None:
            raise ValueError(f"found {value}, but the files determine the size of the vocabulary; remove the setting")
        return value

    @field_validator("path")
    @classmethod
    def _path_fits_type(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        kind = info.data.get("type")
        if kind == "file" and value is None:
            raise ValueError('missing; a file tokenizer needs its directory, for example path = "gpt2-vocab"')
        if kind not in (None, "file") and value is not None:
            raise ValueError(f"found '{value}', but type {kind} does not use it; remove it or use type file")
        return value

    @field_validator("template")
    @classmethod
    def _known_or_file(cls, value: str | None) -> str | None:
        if value not in (None, TURNS) and not str(value).endswith(".jinja"):
            raise ValueError(f"found '{value}', expected turns or a Jinja file, for example template = \"chat.jinja\"")
        return value

    @field_validator("date", mode="before")
    @classmethod
    def _iso_date(cls, value: Any) -> Any:
        text = str(value)
        with contextlib.suppress(ValueError):
            if value is None or datetime.date.fromisoformat(text).isoformat() == text:
                return None if value is None else text
        raise ValueError(f"found {text!r}, expected a date such as 2025-01-31")

    @field_validator("date", "enable_thinking")
    @classmethod
    def _for_jinja(cls, value: Any, info: ValidationInfo) -> Any:
        template, kind = info.data.get("template"), info.data.get("type")
        if value is not None and (template == TURNS or (template is None and kind != "file")):
            raise ValueError(f'found {value}, but the chat format "turns" has no {info.field_name}; remove the setting')
        return value

    @field_validator("alphabet", "pattern", "template")
    @classmethod
    def _setting_fits_type(cls, value: str | None, info: ValidationInfo) -> str | None:
        name, kind = info.field_name or "", info.data.get("type")
        types = {"alphabet": ("char",), "pattern": ("byte-bpe",), "template": (*MIN_VOCAB, "file")}[name]
        if kind is not None and kind not in types and value != cls.model_fields[name].default:
            choices = " or ".join(types)
            raise ValueError(f"found {value!r}, but type {kind} does not use it; remove it or use type {choices}")
        return value


class TokensSettings(Settings):
    """Kind `tokens`, derived as `corpus@tokenizer`: a corpus encoded into a train and a val store."""

    corpus: Annotated[str, Stage("documents")]
    """The corpus stage to encode."""
    tokenizer: Annotated[str, Stage("tokenizer")]
    """The tokenizer stage that encodes it."""
    workers: Annotated[int | None, Field(ge=1), EXECUTION] = None
    """Encoding threads. Default: all cores that the process may use."""
