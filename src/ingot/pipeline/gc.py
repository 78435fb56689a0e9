"""Stage directories that nothing links to any more."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ingot.core.artifact import RECORD, STAGES, StageDir
from ingot.stages.job import inputs_of, open_stage, read_result


@dataclass(frozen=True)
class Orphan:
    """A stage's directory that no link of a run, or of a point of a sweep, leads to, that no adapter lies on, and that
    nothing unfinished reads.

    One that has not begun is none: it holds what `ingot tune` has chosen for the stage.
    """

    path: Path
    bytes: int
    what: str
    """Its name in the recipe, and how far it came."""


def orphans(root: Path) -> list[Orphan]:
    """All orphans below an output root, largest first; directories being written now are never among them."""
    stages = root / STAGES
    if not stages.is_dir():
        return []
    runs = [p for p in root.iterdir() if p.is_dir() and p.resolve() != stages.resolve()]
    links = [p for run in runs for place in (run, *filter(_real, run.iterdir())) for p in place.iterdir()]
    kept: set[Path] = set()
    for link in links:
        if link.is_symlink() and link.exists():
            _keep(link.resolve(), kept)
    found = [path for path in map(StageDir, stages.iterdir()) if path.exists()]
    for stage in found:
        if stage.is_locked():
            _keep(stage.path.resolve(), kept)
    left = [stage.path for stage in found if stage.path.resolve() not in kept and not stage.is_locked()]
    sized = [Orphan(path, sum(f.stat().st_size for f in path.rglob("*") if f.is_file()), _what(path)) for path in left]
    return sorted(sized, key=lambda o: -o.bytes)


def _what(stage: Path) -> str:
    name = open_stage(stage)["name"]
    if not StageDir(stage).is_done():
        return f"{name}, not finished"
    loss = read_result(stage).get("val_loss_nats")
    return f"{name}, finished" + (f", validation loss {loss:.4f}" if loss is not None else "")


def _keep(stage: Path, kept: set[Path]) -> None:
    """A stage, with what it reads while it is made, or for good: an adapter lies on the rest of its model."""
    if stage in kept:
        return
    kept.add(stage)
    if (stage / RECORD).exists():
        told, inputs = open_stage(stage), inputs_of(stage)
        if not StageDir(stage).is_done():
            for read in inputs.values():
                _keep(read.path, kept)
        elif told["kind"] == "train" and told["settings"].get("adapter"):
            _keep(inputs["init"].path, kept)


def _real(path: Path) -> bool:
    """Whether a path is a directory and no link to one."""
    return path.is_dir() and not path.is_symlink()


def delete_all(found: list[Orphan]) -> None:
    """Remove the directories, each held while it goes."""
    for orphan in found:
        with StageDir(orphan.path).lock():
            shutil.rmtree(orphan.path)
