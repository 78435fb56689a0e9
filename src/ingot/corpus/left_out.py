"""Leaves documents out of a corpus that its setting `without` names, with all copies of their text.

A document is named PATH#OFFSET, as `ingot trace` shows it, or PATH for all documents of a file. Copies are left out
too: of equal documents only the first is kept, and without it the next one would take its place.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.corpus.dedup import rows_of
from ingot.corpus.rules import KEY

LEFT_OUT = "left_out"
"""Reason to drop these documents."""
COLUMNS = ["path", "offset", KEY]


def paths_of(name: str) -> tuple[str, str]:
    """The paths that a document's name may mean: all of it, or the part before its last "#"."""
    return name, name.rpartition("#")[0]


def matches(name: str, path: str, offset: int) -> bool:
    """Whether a document's name is that of the document at a path and an offset."""
    return name in (path, f"{path}#{offset}")


def left_out(tables: Iterable[pa.Table], names: Sequence[str]) -> np.ndarray:
    """The numbers of the documents to leave out, in order.

    Args:
        tables: all documents in order, with `COLUMNS`.
        names: the setting.

    Raises:
        UserError: a name that no document has.
    """
    by_path: dict[str, list[str]] = {}
    for name in names:
        for path in paths_of(name):
            by_path.setdefault(path, []).append(name)
    seen: set[str] = set()
    named, keys = [np.zeros(0, bool)], [np.zeros((0, 16), np.uint8)]
    for table in tables:
        offsets, mask = table["offset"].to_pylist(), np.zeros(table.num_rows, bool)
        for row, path in enumerate(table["path"].to_pylist()):
            found = [name for name in by_path.get(path, []) if matches(name, path, offsets[row])]
            mask[row] = bool(found)
            seen.update(found)
        named.append(mask)
        keys.append(rows_of(table[KEY]))
    if missing := [name for name in names if name not in seen]:
        raise UserError(
            f"without: found '{missing[0]}', expected PATH or PATH#OFFSET of a document of the sources, as "
            "`ingot trace --text` shows them; correct it, or remove it if the document is gone"
        )
    rows, all_keys = np.concatenate(named), np.concatenate(keys).view("V16").ravel()
    return np.flatnonzero(rows | np.isin(all_keys, all_keys[rows]))
