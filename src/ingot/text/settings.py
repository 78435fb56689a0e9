"""Settings of the two text stages: the tokenizer, and the token store that is derived from a corpus and a tokenizer.

One model serves both tokenizer types, because a recipe that switches `type` should be told which of its settings lost
their meaning instead of having them ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from ingot.core.recipe import EXECUTION, Settings

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
ROLES_OF_SPECIALS = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
"""What of the block is for what, in the words of model directories."""

BYTES = 256
SMALLEST_VOCAB = BYTES + len(SPECIALS)

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
    """Kind `tokenizer`: learn a vocabulary from the train split of corpora."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    source: list[str] = Field(alias="from", min_length=1)
    """Corpus stages whose train split is learned from; one name or a list (written `from` in a recipe)."""
    type: Literal["byte-bpe", "char"] = "byte-bpe"
    """`byte-bpe`: byte-level merges, any UTF-8 text. `char`: one id a character, no special tokens, so no chat."""
    vocab: int | None = None
    """Size of the whole vocabulary of a `byte-bpe`, special tokens included; a `char` vocabulary follows its text."""
    alphabet: Literal["corpus", "unicode"] = "corpus"
    """`char` only: ids number the characters of the train split, or are the Unicode code points themselves."""
    pattern: str = Field(default=PATTERN, min_length=1)
    """`byte-bpe` only: regular expression whose matches are never merged across; it must match every character."""
    sample_bytes: int = Field(default=100_000_000, gt=0, lt=2**31)
    """UTF-8 bytes of text to learn from; more than this is sampled evenly (the trainer counts pairs in 32 bits)."""
    template: Literal["turns"] = "turns"
    """Chat format: `<|role|>content<|end|>` for each message."""

    @field_validator("source", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("vocab")
    @classmethod
    def _vocab_fits_type(cls, value: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind == "byte-bpe" and value is None:
            raise ValueError("missing; a byte-bpe needs the size of its vocabulary, for example vocab = 4096")
        if kind == "byte-bpe" and value is not None and value < SMALLEST_VOCAB:
            raise ValueError(
                f"found {value}, expected at least {SMALLEST_VOCAB} "
                f"({BYTES} bytes + {len(SPECIALS)} special tokens); give a larger one"
            )
        if kind == "char" and value is not None:
            raise ValueError(f"found {value}, but a char vocabulary is as large as its alphabet; remove the setting")
        return value

    @field_validator("alphabet", "pattern")
    @classmethod
    def _setting_fits_type(cls, value: str, info: ValidationInfo) -> str:
        name, kind = info.field_name or "", info.data.get("type")
        owner = {"alphabet": "char", "pattern": "byte-bpe"}[name]
        if kind is not None and kind != owner and value != cls.model_fields[name].default:
            raise ValueError(f"found {value!r}, but it means nothing to type {kind}; remove it or use type {owner}")
        return value


class TokensSettings(Settings):
    """Kind `tokens`, derived as `corpus@tokenizer`: a corpus encoded once into a train and a val store."""

    corpus: str
    """The corpus stage to encode."""
    tokenizer: str
    """The tokenizer stage that encodes it."""
    workers: Annotated[int | None, Field(ge=1), EXECUTION] = None
    """Encoding threads; by default every core that the process may use."""
