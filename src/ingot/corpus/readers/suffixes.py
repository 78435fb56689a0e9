"""What the suffix of a file says: prose, source code, rows or pages of the web."""

import os.path

from ingot.corpus.readers.content import Kind

_PROSE = ".txt .text .md .markdown .rst .tex .org .adoc .xml"
_CODE = (
    ".py .pyi .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .js .jsx .mjs .ts .tsx .rb .php .pl .pm "
    ".lua .r .jl .swift .m .mm .cs .fs .hs .ml .ex .exs .erl .clj .lisp .el .sh .bash .zsh .ps1 .sql .css .scss .vue "
    ".toml .yaml .yml .ini .cfg .cmake .mk .proto .zig .nim .v .vhd .asm .s"
)
CODE_SUFFIXES = frozenset(_CODE.split())
SUFFIXES = frozenset(_PROSE.split()) | CODE_SUFFIXES
"""Suffixes that a directory walk reads as text, one document per file. A file named in the recipe may have any."""
ROWS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
"""Suffixes of files with one document per row; every other file is one document."""
PAGES: dict[str, Kind] = {".html": "html", ".htm": "html", ".xhtml": "html", ".warc": "warc", ".wet": "warc"}
"""Suffixes of pages of the web, and of archives of them."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lzma")


def inner_suffix(name: str) -> str:
    """The suffix below a compression suffix: `.jsonl` of `a.jsonl.zst`."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in _COMPRESSED else suffix


def is_readable(name: str) -> bool:
    """Whether a directory walk reads a file of this name."""
    suffix = inner_suffix(name)
    return suffix in SUFFIXES or suffix in ROWS or suffix in PAGES
