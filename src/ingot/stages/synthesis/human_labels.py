"""The file for human labels: a line for each two answers to a prompt, in which a person notes the better one.

    {"prompt": "...", "a": "...", "b": "...", "better": ""}

Valid values of `better` are "a", "b" and "tie". The stage waits (WAIT) until every line has one. The content of the
file is part of the stage's key, so a changed label runs the stage and all that depend on it again.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_lines
from ingot.core.errors import UserError
from ingot.core.file_hashes import FileHashes

FIELDS = ("prompt", "a", "b", "better")
VERDICTS = ("a", "b", "tie")


def waiting_for(path: Path) -> str | None:
    """The labels that the stage needs before it can run; None where every line has one.

    Raises:
        UserError: the file is invalid.
    """
    if not path.exists():
        return f"for human labels in {path}, which is written when the answers are complete"
    rows = read(path)
    if unlabelled := sum(not row["better"] for row in rows):
        return f'for human labels in {path}: {unlabelled:,} of {len(rows):,} lines have no "better" yet'
    return None


def digest(path: Path, hashes: FileHashes) -> str | None:
    """Digest of a complete file; None while labels are missing."""
    return None if waiting_for(path) else hashes.digest(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, labelled or not.

    Raises:
        UserError: a line has missing fields, or an unknown label.
    """
    rows = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); save it as UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):  # an answer may contain other line separators
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}), expected the line as it was written; fix it") from None
        if not isinstance(row, dict) or not set(FIELDS) <= set(row):
            raise UserError(f"{where}: expected an object with {', '.join(FIELDS)}; restore the missing fields")
        if row["better"] not in ("", *VERDICTS):
            raise UserError(f'{where}: found better = {row["better"]!r}, expected "a", "b" or "tie"; correct it')
        rows.append(row)
    return rows


def write(path: Path, rows: Iterable[tuple[str, str, str]]) -> None:
    """Write unlabelled lines, given (prompt, a, b)."""
    atomic_lines(path, (dict(zip(FIELDS, (*row, ""), strict=True)) for row in rows))
