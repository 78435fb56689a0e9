"""Exact duplicates: equal texts, differences in white space aside; the first one seen stays.

The hash (BLAKE2b, 128 bits) covers the whole text, so a short text is deduplicated like a long one, and one shared
header drops nothing (source 001 hashes the first five n-grams and discards texts shorter than one). Only hashes are
kept in memory, about 100 bytes a document.
"""

import hashlib

import numpy as np
import polars as pl


def fingerprints(texts: pl.Series) -> list[bytes]:
    """16 bytes per text that are equal exactly when the texts are, white space normalised; null texts get b""."""
    return [_fingerprint(text) if text is not None else b"" for text in texts]


def clusters(keys: list[bytes]) -> np.ndarray:
    """The `cluster` column: the first 8 bytes of each fingerprint as uint64."""
    return np.array([int.from_bytes(key[:8], "little") for key in keys], dtype=np.uint64)


def _fingerprint(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


class Seen:
    """Remembers fingerprints in document order."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def repeated(self, keys: list[bytes]) -> list[bool]:
        """Whether each key came before, here or in an earlier call."""
        return [self._again(key) for key in keys]

    def _again(self, key: bytes) -> bool:
        if key in self._keys:
            return True
        self._keys.add(key)
        return False
