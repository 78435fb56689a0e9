"""What a tokenizer is: what the rest of the house knows of one, and what all types share.

Three members say how ids stand in a text. `start` is what comes before its first word (a model that learned a
beginning-of-text token needs it, one that learned documents with an `eot` behind each starts after an `eot`), `eot`
ends it, `pad` fills a row. `decode_bytes` is the concatenation of what each id stands for, so it may be called on any
part of a sequence; `decode` is the text of a whole one, where a type that puts a space before every text takes it away
again.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_json, digest_json

FORMAT, VERSION = "ingot-tokenizer", 1


class Tokenizer(ABC):
    """Text to ids and back."""

    kind: str
    vocab: int
    """Number of ids, special tokens included."""
    specials: dict[str, int]
    """Special token -> id; empty for characters and words."""
    names: Mapping[str, str] = {}
    """What special tokens are for, as model directories say it: `eos_token`, `bos_token`, `pad_token`, `unk_token`."""
    template: str = ""
    """Chat format: `turns`, the source of a Jinja template, or "" where there is none."""
    stops: tuple[int, ...] = ()
    """Ids that end an answer besides `eot` and those that the template shows."""
    marks: Mapping[str, str] = {}
    """Special token -> the unguessable name that stands for it in the texts of `encode_marked`."""
    lossless: bool = True
    """Whether ids spell every text exactly; else a report says what is lost (unknown words, normalised characters)."""
    unknown: int | None = None
    """The id that stands for what the vocabulary cannot spell, where there is one."""
    lengths: np.ndarray
    """UTF-8 bytes that each id stands for [vocab]; 0 for special tokens and the unknown one."""

    @abstractmethod
    def definition(self) -> dict[str, Any]:
        """Everything that determines ids, as plain data."""

    @property
    def fingerprint(self) -> str:
        """Digest of the definition."""
        return digest_json(self.definition())

    @property
    def eot(self) -> int | None:
        """The id that ends a document, where the vocabulary has one."""
        return self.specials.get(self.names.get("eos_token", ""))

    @property
    def pad(self) -> int:
        """The id that fills a row; it is never predicted, so any will do where the vocabulary has none for it."""
        pad = self.specials.get(self.names.get("pad_token", ""))
        return (self.eot or 0) if pad is None else pad

    @property
    def start(self) -> list[int]:
        """What a model is given before the first id of a text: its beginning-of-text id, else `eot`, else nothing."""
        first = self.specials.get(self.names.get("bos_token", ""), self.eot)
        return [] if first is None else [first]

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids [n] (uint32) that spell `text`; never special ones. Raises UserError on text it cannot spell."""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of every text; the result does not depend on `threads`."""
        if threads <= 1 or len(texts) <= 1:
            return [self.encode(text) for text in texts]
        size = -(-len(texts) // (4 * threads))  # a few parts a thread: little overhead, yet an even end
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(threads) as pool:  # the encoders let go of the interpreter lock
            return [ids for part in pool.map(self.encode_batch, parts) for ids in part]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Texts with special tokens, which are written as their `marks`.

        Returns:
            for each text its ids [n] (uint32), and [n, 2] first character and last + 1 of what each id spells.
        """
        raise AssertionError(f"a {self.kind} tokenizer has no special tokens")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that ids stand for, wherever in a sequence they are."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; a special token's are its name."""
        return self.decode_bytes([token])

    def spelled_bytes(self, ids: np.ndarray) -> int:
        """How many UTF-8 bytes ids stand for, special tokens and the unknown one counting none."""
        return int(self.lengths[ids].sum())

    def save(self, path: Path) -> None:
        """Write the JSON file that `load_tokenizer` reads."""
        head = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint}
        atomic_json(path, {**head, **self.definition()})


def unguessable(specials: Iterable[str]) -> dict[str, str]:
    """`marks` for special tokens: other ones in every process, so that no text has them by intent."""
    secret = secrets.token_hex(16)
    return {name: f"{secret}{n:04}" for n, name in enumerate(specials)}
