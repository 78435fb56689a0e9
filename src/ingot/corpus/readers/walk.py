"""Finds the files of a directory or of a glob, and names what is there and is not read.

Only regular files are opened: a named pipe would wait for ever. Links are not followed out of the directory, because
what they lead to (a home directory, another copy of the data) is not what the recipe names.
"""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Reason = Literal["suffix", "hidden", "link", "broken link", "special", "unreadable"]

_WORDS: dict[Reason, tuple[str, str]] = {
    "suffix": ("file without a text suffix", "files without a text suffix"),
    "hidden": ("hidden or generated name", "hidden or generated names"),
    "link": ("link to a directory or out of this one", "links to directories or out of this one"),
    "broken link": ("broken link", "broken links"),
    "special": ("file that is not regular (a pipe, socket or device)", "files that are not regular"),
    "unreadable": ("name without permission to read it", "names without permission to read them"),
}
_ADVICE: dict[Reason, str] = {
    "suffix": "name the files (or a glob) in sources to read them",
    "link": "set follow_links = true of the source to follow links",
    "unreadable": "change the permissions",
}
_GENERATED = frozenset({"__pycache__", "node_modules"})


class Skipped(NamedTuple):
    """A file or directory that is not read."""

    path: Path
    reason: Reason


def describe(skipped: list[Skipped]) -> str:
    """`3 hidden names (such as a/.git); ADVICE` for a message; "" for nothing."""
    counts: Counter[Reason] = Counter(reason for _, reason in skipped)
    first = {reason: path for path, reason in reversed(skipped)}
    items = [f"{n:,} {_WORDS[r][n > 1]} ({'such as ' if n > 1 else ''}{first[r]})" for r, n in counts.items()]
    return "; ".join([", ".join(items), *(_ADVICE[r] for r in counts if r in _ADVICE)])


def walk(
    top: Path, root: Path, follow_links: bool, wanted: Callable[[str], bool], skipped: list[Skipped]
) -> Iterator[Path]:
    """The files below a directory: of each directory first its files, then its directories, sorted by name.

    Args:
        top: the directory.
        root: the directory that links may not leave.
        follow_links: follow links to directories and out of `root`; each directory is read once.
        wanted: whether a file of that name is read.
        skipped: receives what is not read.
    """
    seen: set[str] = set()
    pending = [top]
    while pending:
        directory = pending.pop()
        real = os.path.realpath(directory)
        if real in seen:
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except PermissionError:
            skipped.append(Skipped(directory, "unreadable"))
            continue
        directories = []
        for entry in entries:
            path = directory / entry.name
            if entry.name.startswith(".") or entry.name in _GENERATED:
                skipped.append(Skipped(path, "hidden"))
            elif entry.is_dir():
                if entry.is_symlink() and not follow_links:
                    skipped.append(Skipped(path, "link"))
                else:
                    directories.append(path)
            elif reason := _reason(path, root, follow_links, wanted):
                skipped.append(Skipped(path, reason))
            else:
                yield path
        pending += reversed(directories)


def expand(
    pattern: Path, root: Path, follow_links: bool, wanted: Callable[[str], bool], skipped: list[Skipped]
) -> Iterator[tuple[Path, list[Path]]]:
    """(match, its files) of each match of a glob, sorted; a file that the pattern matches may have any name.

    Args:
        pattern: as `literal_brackets` returns it.
        root, follow_links, wanted, skipped: as for `walk`.
    """
    seen: set[str] = set()
    for match in map(Path, sorted(glob.glob(str(pattern), recursive=True))):
        real = os.path.realpath(match)
        if _is_linked(match, root) and (not follow_links or real in seen):
            skipped.append(Skipped(match, "link"))
        elif match.is_dir():
            yield match, list(walk(match, root, follow_links, wanted, skipped))
        elif reason := _reason(match, root, follow_links, lambda name: True):
            skipped.append(Skipped(match, reason))
        else:
            yield match, [match]
        seen.add(real)


def literal_brackets(path: Path) -> Path:
    """The glob with brackets escaped where a name with them exists: `data [v1]/*` is not `data v/*` or `data 1/*`."""
    pattern = Path()
    for part in path.parts:
        literal = pattern / part.replace("[", "[[]")
        exists = "[" in part and next(glob.iglob(str(literal), recursive=True), None) is not None
        pattern = literal if exists else pattern / part
    return pattern


def glob_root(pattern: Path) -> Path:
    """The directory above the first wildcard."""
    fixed = []
    for part in pattern.parts[:-1]:
        plain = part.replace("[[]", "")
        if glob.has_magic(plain):
            break
        fixed.append(part.replace("[[]", "["))
    return Path(*fixed)


def _reason(path: Path, root: Path, follow_links: bool, wanted: Callable[[str], bool]) -> Reason | None:
    """Why a name that is no directory is not read; None if it is."""
    if not path.exists():
        return "broken link"
    if not path.is_file():
        return "special"
    if not wanted(path.name):
        return "suffix"
    if path.is_symlink() and not follow_links and not _is_below(path, root):
        return "link"
    return None if os.access(path, os.R_OK) else "unreadable"


def _is_linked(match: Path, root: Path) -> bool:
    """Whether a match is a link to a directory, behind one, or a link out of `root`."""
    directories = [match, *match.parents] if match.is_dir() else match.parents
    through = any(path.is_symlink() for path in directories if path != root and path.is_relative_to(root))
    return match.exists() and (through or not _is_below(match, root))


def _is_below(path: Path, root: Path) -> bool:
    """Whether a file is in `root`; the files of a snapshot in the Hugging Face cache are links to `blobs` beside it."""
    real = Path(os.path.realpath(root))
    roots = [real, *(top.parent / "blobs" for top in (real, *real.parents) if top.name == "snapshots")]
    return any(Path(os.path.realpath(path)).is_relative_to(top) for top in roots)
