"""Stage directories that nothing links to any more."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ingot.core.artifact import StageDir


@dataclass(frozen=True)
class Orphan:
    """A directory under `stages` that no `runs/NAME/STAGE` link points to."""

    path: Path
    bytes: int


def orphans(root: Path) -> list[Orphan]:
    """All orphans below an output root, largest first; directories being written now are never among them."""
    stages = root / "stages"
    if not stages.is_dir():
        return []
    linked = {p.resolve() for p in root.glob("*/*") if p.is_symlink() and p.exists()}
    found = [
        Orphan(path, sum(f.stat().st_size for f in path.rglob("*") if f.is_file()))
        for path in stages.iterdir()
        if path.is_dir() and path.resolve() not in linked and not StageDir(path).is_locked()
    ]
    return sorted(found, key=lambda o: -o.bytes)


def delete_all(found: list[Orphan]) -> None:
    """Remove the directories, each held while it goes."""
    for orphan in found:
        with StageDir(orphan.path).lock():
            shutil.rmtree(orphan.path)
