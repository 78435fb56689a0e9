"""A file that people fill: two answers to a prompt a line, and which is the better one.

    {"prompt": "...", "a": "...", "b": "...", "better": ""}

`better` becomes "a", "b" or "tie". While a line is open, the stage waits (WAIT); filled, the file's content is part of
the stage's key, so whoever changes their mind gets the pairs, and all that learns from them, made anew.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.core.artifact import FileHashes, atomic_lines
from ingot.core.errors import UserError

FIELDS = ("prompt", "a", "b", "better")
VERDICTS = ("a", "b", "tie")


def waits(path: Path) -> str | None:
    """Why the stage cannot go on, or None where every line is filled.

    Raises:
        UserError: the file is not as it was written.
    """
    if not path.exists():
        return f"for people to fill {path}, which is written once its answers are there"
    rows = read(path)
    if open_rows := sum(not row["better"] for row in rows):
        return f'for people to fill {path}: {open_rows:,} of {len(rows):,} lines have no "better" yet'
    return None


def digest(path: Path, hashes: FileHashes) -> str | None:
    """Digest of a filled file; None while it is open."""
    return None if waits(path) else hashes.digest(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, filled or not.

    Raises:
        UserError: a line that is none of ours, or an answer that is not known; it is named.
    """
    rows = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not the file as it was written ({error}); save it as UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):  # an answer may hold other ends of a line
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}), expected the line as it was written; mend it") from None
        if not isinstance(row, dict) or not set(FIELDS) <= set(row):
            raise UserError(f"{where}: expected an object with {', '.join(FIELDS)}; put back what is missing")
        if row["better"] not in ("", *VERDICTS):
            raise UserError(f'{where}: found better = {row["better"]!r}, expected "a", "b" or "tie"; correct it')
        rows.append(row)
    return rows


def write(path: Path, rows: Iterable[tuple[str, str, str]]) -> None:
    """Lines to fill, of (prompt, a, b)."""
    atomic_lines(path, (dict(zip(FIELDS, (*row, ""), strict=True)) for row in rows))
