"""From a path that a user names to stage directories: a stage, a run with its stages, or a sweep with its points."""

from pathlib import Path

from ingot.core.artifact import RECORD, STAGES
from ingot.core.dashboards import Target, replay, require
from ingot.core.errors import UserError
from ingot.core.sweep import SWEEP
from ingot.report import reading


def stages_at(path: Path) -> list[Path]:
    """The started stages that a path names, by the links that people know them by.

    Raises:
        UserError: neither a stage nor a run.
    """
    if (path / RECORD).exists():
        return [path]
    points = reading.read_json(path / SWEEP).get("points", ())
    if found := [s for p in points for s in _linked(path / p["label"])] or _linked(path):
        return found
    raise UserError(
        f"{path}: no stage and no run with started stages, expected a path such as runs/NAME/base or runs/NAME"
    )


def _linked(run: Path) -> list[Path]:
    return sorted(p for p in run.glob("*") if p.is_symlink() and (p / RECORD).exists())


def show_in(sink: str, paths: list[Path]) -> dict[str, int]:
    """Give a sink all that these stages have logged so far.

    Returns: stage -> the number of its events that had numbers.

    Raises:
        UserError: a path is no stage, none has numbers, or the sink is not installed.
    """
    require([sink])
    shown = {}
    for stage in (s for p in paths for s in stages_at(p)):
        record = reading.record(stage)
        run, label = place(stage)
        target = Target(root_of(stage), run, label, record["kind"], record["key"], record["settings"])
        if events := replay(stage, sink, target):
            shown[str(stage)] = events
    if not shown:
        raise UserError(f"{', '.join(map(str, paths))}: no stage has logged numbers by step; a train stage does")
    return shown


def root_of(stage: Path) -> Path:
    """The output root that a stage belongs to."""
    stages = stage.resolve().parent
    return next((p for p in stage.absolute().parents if (p / STAGES).resolve() == stages), stages.parent)


def place(stage: Path) -> tuple[str, str]:
    """A stage's run and its name there: runs/x/lr=0.001,seed=1/base is of x, and called lr=0.001,seed=1/base."""
    link = stage.parent.resolve() / stage.name
    try:
        run, *label = link.relative_to(root_of(stage).resolve()).parts
    except ValueError:  # a link from elsewhere
        run, label = link.parent.name, [link.name]
    return run, "/".join(label)
