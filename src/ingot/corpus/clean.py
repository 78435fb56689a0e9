"""Characters that carry no text go; everything else stays as it was written.

Newlines become LF, control characters and a byte order mark go, Unicode is composed (NFC), and a document ends with at
most one newline. Indentation is never touched. Cleaning is idempotent: a clean text passes byte for byte, and most
rows pass one search and are not rewritten at all.

Rejected: NFKC and replacing "smart" punctuation (they change what was written: x² becomes x2), and collapsing white
space (it destroys code and verse).
"""

from collections.abc import Callable

import numpy as np
import polars as pl

from ingot.corpus.readers.utf8 import flatten, followed_by, rows_at

_BREAKS = r"\r\n|[\r\x0b\x0c\x{85}]"
_CONTROLS = r"[\x00-\x08\x0e-\x1f\x7f-\x{84}\x{86}-\x{9f}]"
_ENDS = r"[ \t]\z|\n\n\z|\n[ \t]+\n\z"
_C1 = [*range(0x80, 0xA0)]
_UNSTABLE = (
    r"[^\x00-\x{2ff}\x{370}-\x{373}\x{375}-\x{37d}\x{37f}-\x{386}\x{388}-\x{3ff}\x{400}-\x{482}\x{48a}-\x{52f}"
    r"\x{5d0}-\x{5ea}\x{621}-\x{64a}\x{e01}-\x{e30}\x{2002}-\x{2064}\x{20a0}-\x{20c0}\x{2190}-\x{2328}\x{2460}-\x{2adb}"
    r"\x{3001}-\x{3029}\x{3041}-\x{3096}\x{30a1}-\x{30fc}\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{ac00}-\x{d7a3}"
    r"\x{ff01}-\x{ffee}\x{1f300}-\x{1faff}]"
)
"""Characters outside of those that NFC leaves alone in any company; a text without one is not normalised."""
_LINE_ENDS = r"(?m)[ \t]+$"


def clean_texts(texts: pl.Series, trim_lines: bool = False) -> pl.Series:
    """Cleaned texts, row for row."""
    texts = _at(texts, _suspect(texts).arg_true(), _scrub)
    wide = (texts.str.len_bytes() != texts.str.len_chars()).arg_true()
    unstable = wide.filter(texts.gather(wide).str.contains(_UNSTABLE))
    texts = _at(texts, unstable, lambda t: t.str.normalize("NFC"))
    if trim_lines:
        texts = _end(texts.str.replace_all(_LINE_ENDS, ""))
    return texts


def _scrub(texts: pl.Series) -> pl.Series:
    texts = texts.str.replace_all(_BREAKS, "\n").str.replace_all(_CONTROLS, "")
    return _end(texts.str.replace(r"\A\x{feff}+", ""))


def _end(texts: pl.Series) -> pl.Series:
    return texts.str.replace(r"[ \t]+\z", "").str.replace(r"\n[ \t\n]+\z", "\n")


def _suspect(texts: pl.Series) -> pl.Series:
    """Which texts hold a character that goes, or have an end that is trimmed."""
    data, starts = flatten(texts)
    controls = (data < 0x09) | (data - np.uint8(0x0B) < 0x15) | (data == 0x7F)  # the difference wraps around
    places = np.concatenate((np.flatnonzero(controls), followed_by(data, 0xC2, _C1)))
    found = pl.Series(rows_at(places, starts, len(texts)))
    return found | texts.str.starts_with("\ufeff") | texts.str.contains(_ENDS)


def _at(texts: pl.Series, rows: pl.Series, change: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Apply `change` to some rows only: it is the rare case, and rewriting text is the dear part."""
    return texts.clone().scatter(rows, change(texts.gather(rows))) if len(rows) else texts  # `scatter` writes in place
