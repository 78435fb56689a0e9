"""Text cleaning that preserves content.

Line ends become LF, control characters and a byte order mark are removed, Unicode is composed (NFC), and a document
ends with at most one newline. Indentation is preserved. Cleaning is idempotent: a clean text is returned byte for byte.

NFKC and "smart" punctuation are left alone because normalising them changes content (x² would become x2). White space
is not collapsed because code and verse depend on it.
"""

from collections.abc import Callable

import numpy as np
import polars as pl

from ingot.corpus.readers.utf8 import find_sequences, flatten, rows_with

_BREAKS = r"\r\n|[\r\x0b\x0c\x{85}]"
_CONTROLS = r"[\x00-\x08\x0e-\x1f\x7f-\x{84}\x{86}-\x{9f}]"
_UNTRIMMED_END = r"[ \t]\z|\n\n\z|\n[ \t]+\n\z"
_C1 = [*range(0x80, 0xA0)]
_NEEDS_NFC = (
    r"[^\x00-\x{2ff}\x{370}-\x{373}\x{375}-\x{37d}\x{37f}-\x{386}\x{388}-\x{3ff}\x{400}-\x{482}\x{48a}-\x{52f}"
    r"\x{5d0}-\x{5ea}\x{621}-\x{64a}\x{e01}-\x{e30}\x{2002}-\x{2064}\x{20a0}-\x{20c0}\x{2190}-\x{2328}\x{2460}-\x{2adb}"
    r"\x{3001}-\x{3029}\x{3041}-\x{3096}\x{30a1}-\x{30fc}\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{ac00}-\x{d7a3}"
    r"\x{ff01}-\x{ffee}\x{1f300}-\x{1faff}]"
)
"""Every character outside the ranges that NFC never changes or composes; a text without one is already NFC."""
_TRAILING_BLANKS = r"(?m)[ \t]+$"


def clean_texts(texts: pl.Series, trim_lines: bool = False) -> pl.Series:
    """Clean each text.

    Args:
        texts: one string per row.
        trim_lines: also remove blanks at the end of every line.
    """
    texts = _apply_to_rows(texts, _needs_scrub(texts).arg_true(), _scrub)
    multibyte = (texts.str.len_bytes() != texts.str.len_chars()).arg_true()
    unnormalized = multibyte.filter(texts.gather(multibyte).str.contains(_NEEDS_NFC))
    texts = _apply_to_rows(texts, unnormalized, lambda t: t.str.normalize("NFC"))
    if trim_lines:
        texts = _trim_end(texts.str.replace_all(_TRAILING_BLANKS, ""))
    return texts


def _scrub(texts: pl.Series) -> pl.Series:
    texts = texts.str.replace_all(_BREAKS, "\n").str.replace_all(_CONTROLS, "")
    return _trim_end(texts.str.replace(r"\A\x{feff}+", ""))


def _trim_end(texts: pl.Series) -> pl.Series:
    return texts.str.replace(r"[ \t]+\z", "").str.replace(r"\n[ \t\n]+\z", "\n")


def _needs_scrub(texts: pl.Series) -> pl.Series:
    """Boolean mask of the texts that `_scrub` changes."""
    data, starts = flatten(texts)
    controls = (data < 0x09) | (data - np.uint8(0x0B) < 0x15) | (data == 0x7F)  # uint8 differences wrap around
    positions = np.concatenate((np.flatnonzero(controls), find_sequences(data, 0xC2, _C1)))
    has_control = pl.Series(rows_with(positions, starts, len(texts)))
    return has_control | texts.str.starts_with("\ufeff") | texts.str.contains(_UNTRIMMED_END)


def _apply_to_rows(texts: pl.Series, rows: pl.Series, change: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Apply `change` to the given rows only: few rows need it, and rewriting text is expensive."""
    return texts.clone().scatter(rows, change(texts.gather(rows))) if len(rows) else texts  # `scatter` writes in place
