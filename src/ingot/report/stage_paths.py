"""Resolve a path on the command line to stage directories: a stage, a run, or a sweep."""

from pathlib import Path

from ingot.core.artifact import RECORD, STAGES
from ingot.core.dashboards import Target, replay, require
from ingot.core.errors import UserError
from ingot.core.sweep import SWEEP
from ingot.report import reading


def stages_at(path: Path) -> list[Path]:
    """The started stages at a path, as links in the runs' directories.

    Raises:
        UserError: the path is neither a stage nor a run.
    """
    if (path / RECORD).exists():
        return [path]
    points = reading.read_json(path / SWEEP).get("points", ())
    if stages := [s for p in points for s in _linked(path / p["label"])] or _linked(path):
        return stages
    raise UserError(
        f"{path}: no stage and no run with started stages, expected a path such as runs/NAME/base or runs/NAME"
    )


def _linked(run: Path) -> list[Path]:
    return sorted(p for p in run.glob("*") if p.is_symlink() and (p / RECORD).exists())


def send_to_dashboard(sink: str, paths: list[Path]) -> dict[str, int]:
    """Send everything that these stages have logged so far to a dashboard.

    Returns:
        stage -> the number of its events with metrics.

    Raises:
        UserError: a path is not a stage, no stage has metrics, or the dashboard's package is not installed.
    """
    require([sink])
    sent = {}
    for stage in (s for p in paths for s in stages_at(p)):
        record = reading.record(stage)
        run, name = run_and_name(stage)
        target = Target(root_of(stage), run, name, record["kind"], record["key"], record["settings"])
        if events := replay(stage, sink, target):
            sent[str(stage)] = events
    if not sent:
        raise UserError(
            f"{', '.join(map(str, paths))}: found no metrics by step, expected a train stage that has begun"
        )
    return sent


def root_of(stage: Path) -> Path:
    """The output root that a stage belongs to."""
    stages = stage.resolve().parent
    return next((p for p in stage.absolute().parents if (p / STAGES).resolve() == stages), stages.parent)


def run_and_name(stage: Path) -> tuple[str, str]:
    """A stage's run, and its name in it: runs/x/lr=0.001,seed=1/base -> ("x", "lr=0.001,seed=1/base")."""
    link = stage.parent.resolve() / stage.name
    try:
        run, *name = link.relative_to(root_of(stage).resolve()).parts
    except ValueError:  # the link is outside the output root
        run, name = link.parent.name, [link.name]
    return run, "/".join(name)
