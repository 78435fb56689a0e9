"""Stage directories that nothing links to any more."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.core.artifact import RECORD, STAGES, StageDir
from ingot.stages.job import inputs_of, open_stage


@dataclass(frozen=True)
class Orphan:
    """A stage's directory that no link of a run, or of a point of a sweep, leads to, and no adapter lies on.

    One that has not begun is none: it holds what `ingot tune` has chosen for the stage.
    """

    path: Path
    bytes: int


def orphans(root: Path) -> list[Orphan]:
    """All orphans below an output root, largest first; directories being written now are never among them."""
    stages = root / STAGES
    if not stages.is_dir():
        return []
    runs = [p for p in root.iterdir() if p.is_dir() and p != stages]
    links = [p for run in runs for place in (run, *run.iterdir()) if _real(place) for p in place.iterdir()]
    linked = {d for p in links if p.is_symlink() and p.exists() for d in _whole(p.resolve())}
    found = [
        Orphan(path, sum(f.stat().st_size for f in path.rglob("*") if f.is_file()))
        for path in stages.iterdir()
        if StageDir(path).exists() and path.resolve() not in linked and not StageDir(path).is_locked()
    ]
    return sorted(found, key=lambda o: -o.bytes)


def _whole(stage: Path) -> Iterator[Path]:
    """A stage and, where it is an adapter, the stages that hold the rest of its model."""
    yield stage
    if (stage / RECORD).exists():
        told = open_stage(stage)
        if told["kind"] == "train" and told["settings"].get("adapter"):
            yield from _whole(inputs_of(stage)["init"].path)


def _real(path: Path) -> bool:
    """Whether a path is a directory and no link to one."""
    return path.is_dir() and not path.is_symlink()


def delete_all(found: list[Orphan]) -> None:
    """Remove the directories, each held while it goes."""
    for orphan in found:
        with StageDir(orphan.path).lock():
            shutil.rmtree(orphan.path)
