"""The formats of token files (`token_files.py`) and their names. No numpy: the parent process reads recipes with it."""

from pathlib import Path
from typing import Literal

TokenFormat = Literal["nanogpt", "llm.c", "megatron", "datatrove"]
_BESIDE: dict[TokenFormat, tuple[str, ...]] = {
    "nanogpt": (),
    "llm.c": (),
    "megatron": ("{stem}.idx",),
    "datatrove": ("{name}.index", "{name}.metadata"),
}


def files_beside(file: Path, format: TokenFormat) -> list[Path]:
    """The files that a format has beside that with the ids: what they index, and what they say about it."""
    return [file.with_name(name.format(stem=file.stem, name=file.name)) for name in _BESIDE[format]]
