"""Characters that carry no text go; everything else stays as it was written.

Newlines become LF, control characters and a byte order mark go, Unicode is composed (NFC), and a document ends with at
most one newline. Indentation is never touched. Cleaning is idempotent: a clean text passes byte for byte, and most
rows pass one search and are not rewritten at all.

Rejected: NFKC and replacing "smart" punctuation (they change what was written: x² becomes x2), and collapsing white
space (it destroys code and verse).
"""

import polars as pl

_BREAKS = r"\r\n|[\r\x0b\x0c\x{85}]"
_CONTROLS = r"[\x00-\x08\x0e-\x1f\x7f-\x{84}\x{86}-\x{9f}]"
_SUSPECT = rf"[\r\x0b\x0c]|{_CONTROLS}|\x{{85}}|\A\x{{feff}}|[ \t]\z|\n\n\z|\n[ \t]+\n\z"
_LINE_ENDS = r"(?m)[ \t]+$"


def clean_texts(texts: pl.Series, trim_lines: bool = False) -> pl.Series:
    """Cleaned texts, row for row."""
    texts = _where(texts, texts.str.contains(_SUSPECT), _scrub)
    texts = _where(texts, texts.str.len_bytes() != texts.str.len_chars(), lambda t: t.str.normalize("NFC"))
    if trim_lines:
        texts = _end(texts.str.replace_all(_LINE_ENDS, ""))
    return texts


def _scrub(texts: pl.Series) -> pl.Series:
    texts = texts.str.replace_all(_BREAKS, "\n").str.replace_all(_CONTROLS, "")
    return _end(texts.str.replace(r"\A\x{feff}+", ""))


def _end(texts: pl.Series) -> pl.Series:
    return texts.str.replace(r"[ \t]+\z", "").str.replace(r"\n[ \t\n]+\z", "\n")


def _where(texts: pl.Series, mask: pl.Series, change) -> pl.Series:
    """Apply `change` to the masked rows only: it is the rare case, and rewriting text is the dear part."""
    if not mask.any():
        return texts
    return texts.scatter(mask.arg_true(), change(texts.filter(mask)))
