"""Finds and deletes stage directories that no run needs any more."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ingot.core.artifact import RECORD, STAGES, StageDir
from ingot.stages.job import inputs_of, read_record, read_result


@dataclass(frozen=True)
class Orphan:
    """A stage's directory that no run needs.

    A directory is needed if a run (or a point of a sweep) links to it, if it is the base model of a needed adapter, or
    if a needed unfinished stage reads it. A directory without `inputs.json` is not an orphan: it contains the choice of
    `ingot tune` for a stage that has not started.
    """

    path: Path
    bytes: int
    description: str
    """The stage's name in the recipe, and whether it is done."""


def orphans(root: Path) -> list[Orphan]:
    """All orphans below an output root, largest first. Directories that are being written are never orphans."""
    stages = root / STAGES
    if not stages.is_dir():
        return []
    runs = [p for p in root.iterdir() if p.is_dir() and p.resolve() != stages.resolve()]
    links = [p for run in runs for point in (run, *filter(_is_real_directory, run.iterdir())) for p in point.iterdir()]
    needed: set[Path] = set()
    for link in links:
        if link.is_symlink() and link.exists():
            _mark_needed(link.resolve(), needed)
    started = [stage for stage in map(StageDir, stages.iterdir()) if stage.exists()]
    for stage in started:
        if stage.is_locked():
            _mark_needed(stage.path.resolve(), needed)
    unused = [stage.path for stage in started if stage.path.resolve() not in needed and not stage.is_locked()]
    return sorted((Orphan(path, _size(path), _describe(path)) for path in unused), key=lambda o: -o.bytes)


def _size(directory: Path) -> int:
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def _describe(stage: Path) -> str:
    name = read_record(stage)["name"]
    if not StageDir(stage).is_done():
        return f"{name}, not done"
    loss = read_result(stage).get("val_loss_nats")
    return f"{name}, done" + (f", validation loss {loss:.4f}" if loss is not None else "")


def _mark_needed(stage: Path, needed: set[Path]) -> None:
    """Add a stage to `needed`, with its inputs while it is unfinished, and with the base model of an adapter always."""
    if stage in needed:
        return
    needed.add(stage)
    if (stage / RECORD).exists():
        record, inputs = read_record(stage), inputs_of(stage)
        if not StageDir(stage).is_done():
            for source in inputs.values():
                _mark_needed(source.path, needed)
        elif record["kind"] == "train" and record["settings"].get("adapter"):
            _mark_needed(inputs["init"].path, needed)


def _is_real_directory(path: Path) -> bool:
    """Whether a path is a directory, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def delete_all(orphans: list[Orphan]) -> None:
    """Delete the directories, each under its lock."""
    for orphan in orphans:
        with StageDir(orphan.path).lock():
            shutil.rmtree(orphan.path)
