"""The interface of a tokenizer, and the code that all types share.

`start_ids` precede a text (the BOS token, which begins every stored document, or else `eot`, which ends the document
before), `eot` ends it and `pad` fills a row. `decode_bytes` concatenates the bytes of each id, so it works on any part
of a sequence; `decode` takes a complete sequence and removes the space that some types put before or after every text.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_json, digest_json

FORMAT, VERSION = "ingot-tokenizer", 1


class Tokenizer(ABC):
    """Encodes text to ids and decodes ids to text."""

    kind: str
    """The type in the settings, such as `byte-bpe`."""
    vocab: int
    """Number of ids, including special tokens."""
    specials: dict[str, int]
    """Special token -> id; empty for the types `char` and `word`."""
    special_tokens_map: Mapping[str, str] = {}
    """`eos_token`, `bos_token`, `pad_token`, `unk_token` -> special token, as in a Hugging Face model directory."""
    template: str = ""
    """Chat format: `turns`, the source of a Jinja template, or "" for none."""
    template_variables: Mapping[str, Any] = {}
    """Variables of the Jinja template: `enable_thinking`, `thinking`, and `date` (ISO format) for the date's forms."""
    stops: tuple[int, ...] = ()
    """Ids that end an answer, in addition to `eot` and the template's end of turn."""
    placeholders: Mapping[str, str] = {}
    """Special token -> the random string that represents it in the texts of `encode_with_specials`."""
    lossless: bool = True
    """Whether decoding restores every text exactly. If not, text is lost as unknown words or normalised characters."""
    unknown: int | None = None
    """The id for text that the vocabulary cannot encode, if there is one."""
    skips_characters: bool = False
    """Whether a character that no piece spells vanishes without an unknown token."""
    trailing_space: bool = False
    """Whether a piece that ends a word ends in a blank, which `decode` removes at the end of a text."""
    lengths: np.ndarray
    """Number of UTF-8 bytes of each id [vocab]; 0 for special tokens and the unknown token."""

    @abstractmethod
    def definition(self) -> dict[str, Any]:
        """Everything that determines the ids, as JSON data."""

    @property
    def chat_format(self) -> dict[str, Any]:
        """The part of the definition that renders conversations."""
        variables = {"template_variables": dict(self.template_variables)} if self.template_variables else {}
        return {"template": self.template, **variables}

    @property
    def fingerprint(self) -> str:
        """Digest of the definition."""
        return digest_json(self.definition())

    @cached_property
    def vocabulary_digest(self) -> str:
        """Digest of the bytes of all ids. Tokenizers whose files differ share it where every id means the same."""
        return digest_json([self.token_bytes(token).hex() for token in range(self.vocab)])

    @property
    def eot(self) -> int | None:
        """The id that ends a document, or None."""
        return self.specials.get(self.special_tokens_map.get("eos_token", ""))

    @property
    def bos(self) -> int | None:
        """The id that begins a text, or None. The tokenizer's own files may leave `bos_token` out."""
        return self.specials.get(self.special_tokens_map.get("bos_token", ""))

    @property
    def pad(self) -> int:
        """The id that fills a row. Padding is never a target, so a vocabulary without a pad token uses another id."""
        pad = self.specials.get(self.special_tokens_map.get("pad_token", ""))
        return (self.eot or 0) if pad is None else pad

    @property
    def start_ids(self) -> list[int]:
        """The ids before a text in training, generation and tasks: the BOS token, or else `eot`, or else none."""
        first = self.eot if self.bos is None else self.bos
        return [] if first is None else [first]

    @property
    def document_start(self) -> list[int]:
        """The ids that a stored document begins with: `start_ids`, unless the `eot` of the document before is them."""
        return [] if self.start_ids == [self.eot] else self.start_ids

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text [n] (uint32), never special tokens. Raises UserError for text it cannot encode."""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of each text; the result does not depend on `threads`."""
        if threads <= 1 or len(texts) <= 1:
            return [self.encode(text) for text in texts]
        size = -(-len(texts) // (4 * threads))  # a few chunks per thread balance overhead against idle threads
        chunks = [texts[start : start + size] for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(threads) as pool:  # the encoders release the GIL
            return [ids for chunk in pool.map(self.encode_batch, chunks) for ids in chunk]

    def encode_with_specials(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode texts in which `placeholders` represent special tokens.

        Returns:
            For each text its ids [n] (uint32) and their spans [n, 2]: start and end (exclusive) in characters.
        """
        raise AssertionError(f"a {self.kind} tokenizer has no special tokens")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a complete sequence. Invalid UTF-8, such as half a character, becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The concatenated bytes of the ids, which may be any part of a sequence."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; those of a special token are its name."""
        return self.decode_bytes([token])

    def text_bytes(self, ids: np.ndarray) -> int:
        """Number of UTF-8 bytes of text that the ids encode; special tokens and the unknown token count 0."""
        return int(self.lengths[ids].sum())

    def save(self, path: Path) -> None:
        """Write the JSON file that `load_tokenizer` reads."""
        header = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint}
        atomic_json(path, {**header, **self.definition()})


def random_placeholders(specials: Iterable[str]) -> dict[str, str]:
    """`placeholders` for special tokens, drawn anew in every process so that no text can contain them."""
    secret = secrets.token_hex(16)
    return {name: f"{secret}{n:04}" for n, name in enumerate(specials)}
