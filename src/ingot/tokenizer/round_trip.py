"""What of a text survives encoding: the bytes that bits per byte count, and a sample that is decoded again.

Bits per byte divide by the bytes of the original text, so that models with different tokenizers compare, although one
that lower-cases or drops blanks has less to predict. Text that became the unknown token, or vanished because no piece
spells it, is not counted: a vocabulary would otherwise improve the number by knowing less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.errors import UserError
from ingot.tokenizer.base import Tokenizer

SHOWN_CHARACTERS = 16
"""Characters from the first difference on that are shown of a text and of what decoding gives."""


def counted_bytes(tokenizer: Tokenizer, text: str, ids: np.ndarray) -> int:
    """Number of UTF-8 bytes of `text` that its ids stand for.

    Raises:
        UserError: the pattern of a lossless tokenizer skips text.
    """
    expected, encoded = len(text.encode("utf-8", "surrogatepass")), tokenizer.text_bytes(ids)
    if tokenizer.lossless and encoded != expected:
        raise UserError(
            f"tokenizer pattern: ids encode {encoded:,} of {expected:,} bytes of a text because the pattern skips the "
            "rest; make it match every character (end it with |\\s|.)"
        )
    partial = tokenizer.skips_characters or (tokenizer.unknown is not None and bool((ids == tokenizer.unknown).any()))
    return min(encoded, expected) if partial else expected


@dataclass
class RoundTrip:
    """A sample of texts that are decoded after encoding.

    Args:
        tokenizer: the tokenizer.
    """

    tokenizer: Tokenizer
    texts: int = 0
    """Number of texts."""
    changed: int = 0
    """Number of texts that decoding does not restore."""
    difference: tuple[str, str] = ("", "")
    """The beginning of the first difference, in the text and in what decoding gives."""

    def add(self, texts: Sequence[str], encoded: Sequence[np.ndarray]) -> None:
        """Decode the ids of texts.

        Raises:
            UserError: a tokenizer that should restore every text does not.
        """
        for text, ids in zip(texts, encoded, strict=True):
            decoded = self.tokenizer.decode(ids)
            self.texts += 1
            if decoded == text:
                continue
            if not self.changed:
                at = next((n for n, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), -1)
                at = min(len(text), len(decoded)) if at < 0 else at
                self.difference = text[at : at + SHOWN_CHARACTERS], decoded[at : at + SHOWN_CHARACTERS]
            self.changed += 1
            if self.tokenizer.lossless:
                raise UserError(f"tokenizer: {self._shown}, although it should restore every text; use another one")

    @property
    def message(self) -> str:
        """What is lost, or "" if nothing is."""
        if not self.changed:
            return ""
        return (
            f"the tokenizer changes text: decoding restores {self.texts - self.changed:,} of {self.texts:,} texts of a "
            f"sample; {self._shown}. Bits per byte count the bytes of the original text, without unknown tokens"
        )

    @property
    def _shown(self) -> str:
        before, after = self.difference
        return f"{before!r} becomes {after!r}"
