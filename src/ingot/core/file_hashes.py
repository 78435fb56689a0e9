"""Digests of the user's files, remembered while a file stays the same."""

import contextlib
import json
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_write, digest_file, regular


class FileHashes:
    """Content digests of source files, cached by (path, size, mtime, ctime, inode): unchanged files are not read again.

    The ctime, unlike the mtime, cannot be set back after a change.

    Args:
        cache: the JSON file that keeps the digests; absent or damaged, it is rebuilt.
    """

    def __init__(self, cache: Path):
        self._cache = cache
        self._known: dict[str, list[Any]] = {}
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError, RecursionError):
            entries = json.loads(cache.read_text()).items()
            self._known = {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 5}
        self._changed = False
        self.read: dict[str, str] = {}
        """The digests that `digest` has returned, by path; a caller may clear it."""

    def digest(self, path: Path) -> str:
        status = regular(path).stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(str(path))
        if known is None or known[:4] != stamp:
            known = self._known[str(path)] = [*stamp, digest_file(path)]
            self._changed = True
        self.read[str(path)] = known[4]
        return known[4]

    def save(self) -> None:
        if self._changed:
            with contextlib.suppress(OSError):  # the cache only saves time
                atomic_write(self._cache, json.dumps(self._known))
            self._changed = False
