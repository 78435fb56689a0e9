"""Settings of the two text stages: the tokenizer, and the token store that is derived from a corpus and a tokenizer.

One model serves all tokenizer types, because a recipe that switches `type` should be told which of its settings lost
their meaning instead of having them ignored.
"""

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
"""The block every subword vocabulary ends with: one size for all, so that a base model can be chat-tuned later
without growing its embedding."""
TURNS = "turns"
"""The chat format of these tokens; another `template` of a tokenizer is the source of a Jinja template, "" is none."""
ROLES_OF_SPECIALS = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
"""What of the block is for what, in the words of model directories."""

BYTES = 256
SMALLEST_VOCAB = {
    "byte-bpe": (BYTES + len(SPECIALS), f"{BYTES} bytes + {len(SPECIALS)} special tokens"),
    "sentencepiece-bpe": (BYTES + len(SPECIALS) + 16, f"{BYTES} bytes, {len(SPECIALS)} special tokens, 16 pieces"),
    "unigram": (BYTES + len(SPECIALS) + 16, f"{BYTES} bytes, {len(SPECIALS)} special tokens, 16 pieces"),
    "wordpiece": (2 * BYTES + len(SPECIALS), f"{BYTES} bytes in two forms + {len(SPECIALS)} special tokens"),
}
"""Subword type -> its smallest vocabulary, and what it holds."""

PATTERN = "|".join(
    (
        r"'(?i:[stdm]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+",  # a word with its marks and at most one sign or space before it
        r"\p{N}{1,2}",  # numbers in pairs of digits: three would spend a small vocabulary on numbers
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",  # signs, with the line they end
        r"\s{0,64}[\r\n]+",  # blank lines
        r"\s{1,64}(?!\S)",  # indentation; the last space goes with the word
        r"\s",
    )
)
"""Splits text before merging, after GPT-4's. Whitespace is cut at 64: an unbounded run overflows the stack of the
backtracking regex engine that both libraries use (a megabyte of spaces is enough)."""


class TokenizerSettings(Settings):
    """Kind `tokenizer`: learn a vocabulary from the train split of corpora, or take one from files."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    type: Literal["byte-bpe", "sentencepiece-bpe", "unigram", "wordpiece", "word", "char", "file"] = "byte-bpe"
    """How text is cut. Subword types spell any text, `word` and `char` do not; `file` takes somebody's vocabulary."""
    source: Annotated[list[str], Stage("documents")] = Field(default=[], alias="from")
    """Corpus stages to learn from, one name or a list (`from` in a recipe); a `file` is only measured on them."""
    vocab: int | None = None
    """Size of a subword vocabulary, special tokens included, or the most words of a `word` (by default all)."""
    path: Annotated[Path | None, EXECUTION] = None
    """`file` only: a directory with `tokenizer.json`, or with GPT-2's two files. Their content is part of the key."""
    alphabet: Literal["corpus", "unicode"] = "corpus"
    """`char` only: ids number the characters of the train split, or are the Unicode code points themselves."""
    pattern: str = Field(default=PATTERN, min_length=1)
    """`byte-bpe` only: regular expression whose matches are never merged across; it must match every character."""
    sample_bytes: int = Field(default=100_000_000, gt=0, lt=2**31)
    """UTF-8 bytes of text to learn from; more than this is sampled evenly (the trainer counts pairs in 32 bits)."""
    template: str | None = None
    """Chat format: `turns` (`<|role|>content<|end|>`) or a Jinja file, NAME.jinja; of a `file` by default its own."""

    @property
    def template_file(self) -> Path | None:
        """The Jinja file that `template` names."""
        return None if self.template in (None, TURNS) else Path(str(self.template))

    @field_validator("source", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _learned_from_something(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if not value and info.data.get("type", "file") != "file":
            raise ValueError('missing; name the corpus stage to learn from, for example from = "clean"')
        return value

    @field_validator("vocab")
    @classmethod
    def _vocab_fits_type(cls, value: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind in SMALLEST_VOCAB:
            smallest, why = SMALLEST_VOCAB[kind]
            if value is None:
                raise ValueError(f"missing; a {kind} needs the size of its vocabulary, for example vocab = 4096")
            if value < smallest:
                raise ValueError(f"found {value}, expected at least {smallest} ({why}); give a larger one")
        if kind == "word" and value is not None and value < 2:
            raise ValueError(f"found {value}, expected at least 2 (<unk> and a word); give a larger one")
        if kind == "char" and value is not None:
            raise ValueError(f"found {value}, but a char vocabulary is as large as its alphabet; remove the setting")
        if kind == "file" and value is not None:
            raise ValueError(f"found {value}, but the files say how large their vocabulary is; remove the setting")
        return value

    @field_validator("path")
    @classmethod
    def _path_fits_type(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        kind = info.data.get("type")
        if kind == "file" and value is None:
            raise ValueError('missing; a file tokenizer needs its directory, for example path = "gpt2-vocab"')
        if kind not in (None, "file") and value is not None:
            raise ValueError(f"found '{value}', but it means nothing to type {kind}; remove it or use type file")
        return value

    @field_validator("template")
    @classmethod
    def _known_or_file(cls, value: str | None) -> str | None:
        if value not in (None, TURNS) and not str(value).endswith(".jinja"):
            raise ValueError(f"found '{value}', expected turns or a Jinja file, for example template = \"chat.jinja\"")
        return value

    @field_validator("alphabet", "pattern", "template")
    @classmethod
    def _setting_fits_type(cls, value: str | None, info: ValidationInfo) -> str | None:
        name, kind = info.field_name or "", info.data.get("type")
        owners = {"alphabet": ("char",), "pattern": ("byte-bpe",), "template": (*SMALLEST_VOCAB, "file")}[name]
        if kind is not None and kind not in owners and value != cls.model_fields[name].default:
            use = " or ".join(owners)
            raise ValueError(f"found {value!r}, but it means nothing to type {kind}; remove it or use type {use}")
        return value


class TokensSettings(Settings):
    """Kind `tokens`, derived as `corpus@tokenizer`: a corpus encoded once into a train and a val store."""

    corpus: Annotated[str, Stage("documents")]
    """The corpus stage to encode."""
    tokenizer: Annotated[str, Stage("tokenizer")]
    """The tokenizer stage that encodes it."""
    workers: Annotated[int | None, Field(ge=1), EXECUTION] = None
    """Encoding threads; by default every core that the process may use."""
