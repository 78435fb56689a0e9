"""The runs below an output root. Each directory has a record, which `ingot run` writes before the first stage starts.

The record holds the recipe with all overrides and the directory that its relative paths refer to, so that `status`,
`report` and `plan` of a run need neither the file nor its `--set` options.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.artifact import RECORD, STAGES, StageDir, atomic_json, read_json
from ingot.core.errors import UserError, notify
from ingot.core.recipe import RESERVED, RUN_RECORD, read_table
from ingot.core.sweep import SWEEP
from ingot.pipeline.graph import Graph, load_graphs


@dataclass(frozen=True)
class Run:
    """A run, from its record, or from its links to stages if it has none (`ingot import`)."""

    path: Path
    record: Mapping[str, Any]
    """recipe, set, only, directory, started (seconds since 1970), table; empty without a record."""
    stages: Mapping[str, StageDir]
    """Name (POINT/STAGE in a sweep) -> directory, inputs first; with `--only` no other stages."""

    @property
    def started(self) -> float:
        """When the run was started last, in seconds since 1970."""
        return self.record.get("started") or self.path.stat().st_mtime


def write_record(graphs: list[Graph], only: list[str]) -> None:
    """Write the record of a run that starts.

    Args:
        only: names of the stages to run; empty for all.
    """
    recipe, stages = graphs[0].recipe, {}
    for graph in graphs:
        for node in graph.needed(only):
            link = graph.link(node).relative_to(graph.run).as_posix()
            stages[link] = node.directory
    record = {
        "recipe": str(recipe.path.absolute()),
        "set": recipe.overrides,
        "only": only,
        "directory": os.getcwd(),
        "started": time.time(),
        "stages": stages,
        "table": recipe.table,
    }
    atomic_json(graphs[0].run / RUN_RECORD, record)


def runs(root: Path) -> list[Run]:
    """All runs below an output root, the newest first."""
    if not root.is_dir():
        return []
    directories = (p for p in root.iterdir() if p.is_dir() and p.name not in RESERVED)
    found = [run for path in directories if (run := read_run(path)).stages]
    return sorted(found, key=lambda run: -run.started)


def read_run(path: Path) -> Run:
    """The run in a directory; without stages if it is none."""
    if is_run(path):
        record = read_json(path / RUN_RECORD)
        named = {name: path.parent / STAGES / directory for name, directory in record.pop("stages").items()}
        return Run(path, record, {name: StageDir(stage) for name, stage in named.items()})
    links = [*path.glob("*"), *(path.glob("*/*") if (path / SWEEP).exists() else ())]
    linked = sorted((p for p in links if p.is_symlink() and (p / RECORD).exists()), key=lambda p: p.lstat().st_mtime)
    return Run(path, {}, {p.relative_to(path).as_posix(): StageDir(p) for p in linked})


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run with a record."""
    return (path / RUN_RECORD).exists()


def last_run(root: Path) -> Path:
    """The directory of the run that was started last: below the output root here, else below that of the nearest parent
    directory that has one.

    Raises:
        UserError: there is none.
    """
    for directory in (Path(), *Path.cwd().parents):
        found = [run for run in runs(directory / root) if run.record]
        if found:
            return found[0].path
    raise UserError(
        f"{root}: no run here or in a parent directory, expected one; name a recipe or a run, or start one with "
        "`ingot run`"
    )


def left_out(graph: Graph) -> dict[str, str]:
    """Stages that the last run left out because of `--only`: name -> the reason."""
    run = read_run(graph.run)
    if not run.record.get("only"):
        return {}
    why = f"not asked for: the last run was --only {' --only '.join(run.record['only'])}"
    links = {name: graph.link(node).relative_to(graph.run).as_posix() for name, node in graph.nodes.items()}
    return {name: why for name, link in links.items() if link not in run.stages}


def run_graphs(path: Path, overrides: list[str], root: Path) -> list[Graph]:
    """The graphs of a run's directory as it was recorded, or of a recipe.

    A recipe without `--set` that was run below the output root gives the graphs of that run. For a run, the process
    changes to the directory in which it was started, since its paths are relative to that.

    Args:
        path: a run's directory or a recipe.
        overrides: `--set` strings.
        root: output root of a recipe.
    """
    run = read_run(path) if is_run(path) else None if overrides else _last_run_of(path, root)
    if run is None:
        return load_graphs(path, overrides, root)
    path, started_in = run.path, Path(run.record["directory"])
    if started_in.is_dir() and not started_in.samefile(Path.cwd()):
        path = path.absolute()
        os.chdir(started_in)
    return load_graphs(path, overrides, path.parent)


def _last_run_of(recipe: Path, root: Path) -> Run | None:
    """The last run of a recipe; None if its directory has no record, or that of another recipe."""
    table = read_table(recipe)[2].get("run")
    path = root / str(table.get("name") if isinstance(table, dict) else None)
    run = read_run(path)
    if run.record.get("recipe") != str(recipe.absolute()):
        return None
    if _has_changed(recipe, run.record):
        notify(f"{recipe} has changed since {path} was run; `ingot plan {recipe}` shows what would run now")
    return run


def _has_changed(recipe: Path, record: Mapping[str, Any]) -> bool:
    try:
        return read_table(recipe, record["set"])[2] != record["table"]
    except UserError:  # an override of a stage that the recipe no longer has
        return True
