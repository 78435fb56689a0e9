"""Reads a recipe: TOML to frozen settings models.

An unknown setting is an error that names the nearest known one. All errors of a file are reported together.
`--set a.b=c` is the only override. The settings models themselves stand beside the code that reads them
(`core/settings.py`).
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, ValidationError, field_validator

from ingot.core.artifact import read_json
from ingot.core.errors import UserError, nearest
from ingot.core.rounds import unroll
from ingot.core.settings import EXECUTION, Seed, Settings
from ingot.core.sweep import SEED, SWEEP, Point, points, with_values
from ingot.core.validation import problems

RESERVED = ("stages", "tensorboard", "wandb")
"""Directories of the output root that are not runs."""
REPORT = "report.html"
"""A run's report, beside the links to its stages."""
TABLE = Path("recipe")
"""Stands in messages for the file of a recipe that is a table."""
RUN_RECORD = "run.json"
"""A run's record beside them: the recipe with all overrides (`pipeline/runs.py` writes it)."""
_MAX_NAME_BYTES = 100
"""Longest stage name. File names are made of two stage names and more, and may have 255 bytes."""


class RunSettings(Settings):
    """The `[run]` table."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Names the directory `runs/NAME` where the stages of this recipe are linked."""
    seed: Seed = 1
    """Seed of initialisation, shuffling and sampling; part of the key only of stages that use it."""
    sinks: Annotated[tuple[str, ...], EXECUTION] = ()
    """Dashboards that receive the metrics of running stages: "tensorboard", "wandb", "trackio"."""

    @field_validator("name")
    @classmethod
    def _not_taken(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"found '{name}', a directory that all runs share; choose another name")
        return name


@dataclass(frozen=True)
class Recipe:
    """A validated recipe: the run's settings, and `(kind, settings)` of each stage in file order."""

    path: Path
    run: RunSettings
    stages: dict[str, tuple[str, Settings]]
    point: Point | None = None
    """The point of a `[sweep]`; None without one."""
    overrides: tuple[str, ...] = ()
    """The `--set` strings."""
    table: Mapping[str, Any] = field(default_factory=dict)
    """The file's content with the overrides, `[sweep]` included."""

    @property
    def home(self) -> str:
        """Directory of the links to its stages, below the output root: NAME, or NAME/POINT in a sweep."""
        return f"{self.run.name}/{self.point.label}" if self.point else self.run.name


def name_problem(name: str) -> str:
    """Why a stage cannot have this name; empty if it can. The name is also that of a link in the run's directory."""
    if not name or len(name.encode()) > _MAX_NAME_BYTES:
        return f"the name has {len(name.encode())} bytes, expected 1 to {_MAX_NAME_BYTES}"
    if "@" in name or "/" in name or name.startswith(".") or not name.isprintable():
        return "the name may not contain '@', '/' or unprintable characters, nor start with '.'"
    return f"every run's directory has a file named {name}" if name in (REPORT, RUN_RECORD, SWEEP) else ""


def load_recipe(path: Path, overrides: list[str], kinds: Mapping[str, type[Settings]]) -> Recipe:
    """Read, override and validate a recipe that has no `[sweep]`; see `load_recipes`."""
    first, *_ = load_recipes(path, overrides, kinds)
    if first.point:
        raise UserError(f"{path}: found a [sweep], expected a single recipe; name a recipe without that table")
    return first


def load_recipes(
    source: Path | Mapping[str, Any], overrides: list[str], kinds: Mapping[str, type[Settings]]
) -> list[Recipe]:
    """Read, override and validate a recipe. Returns one, or one for each point of its `[sweep]`.

    Args:
        source: the TOML file, the directory of a run, whose recorded recipe is read, or a table, which is copied.
        overrides: `a.b=value` strings; a value that is not TOML is a string.
        kinds: stage kind -> its settings model.

    Raises:
        UserError: all problems, one a line.
    """
    path, applied, table = read_table(source, overrides)
    unresolved = tuple(applied), dict(table)
    if "sweep" not in table:
        return [_recipe(path, table, kinds, None, unresolved)]
    swept = points(table.pop("sweep"), table)
    for override in overrides:
        name = override.partition("=")[0].strip()
        if axis := next((axis for axis in swept[0].values if f"{name}.".startswith(f"{axis}.")), None):
            instead = "seeds" if axis == SEED else axis
            where = f"--set {name}: found in [sweep] too, which varies {axis}"
            raise UserError(f"{where}; set sweep.{instead} to a list instead")
    recipes, errors = [], dict[str, None]()  # an ordered set: several points repeat the same error
    for point in swept:
        try:
            recipes.append(_recipe(path, with_values(table, point.values), kinds, point, unresolved))
        except UserError as error:
            errors |= dict.fromkeys(str(error).splitlines())
    if errors:
        raise UserError("\n".join(errors))
    return recipes


def _recipe(
    path: Path,
    table: Mapping[str, Any],
    kinds: Mapping[str, type[Settings]],
    point: Point | None,
    source: tuple[tuple[str, ...], Mapping[str, Any]],
) -> Recipe:
    """Validate a recipe's table, with its rounds unrolled.

    Args:
        source: `Recipe.overrides` and `Recipe.table`.
    """
    table = unroll(table, kinds)
    errors = [
        f"{path}: unknown table [{k}]; {nearest(k, ['run', 'stage', 'sweep', 'repeat'])}"
        for k in table
        if k not in ("run", "stage")
    ]
    run = _validate(RunSettings, table.get("run", {}), "run", errors)
    stages: dict[str, tuple[str, Settings]] = {}
    bodies = table.get("stage", {})
    if not isinstance(bodies, dict):
        raise UserError(f"{path}: stage = {bodies!r}, expected tables such as [stage.clean]")
    for name, body in bodies.items():
        where = f"stage.{name}"
        if not isinstance(body, dict) or "kind" not in body:
            errors.append(f"{where}: no kind; every stage needs kind = one of {', '.join(sorted(kinds))}")
            continue
        if problem := name_problem(name):
            errors.append(f"{where}: {problem}; rename the stage")
            continue
        body = dict(body)
        kind = str(body.pop("kind"))
        if kind not in kinds:
            errors.append(f"{where}.kind: unknown kind '{kind}'; {nearest(kind, kinds)}")
            continue
        settings = _validate(kinds[kind], body, where, errors)
        if settings is not None:
            stages[name] = (kind, settings)
    if not errors and not stages:
        errors.append(f'{path}: no stages; add a table such as [stage.clean] with kind = "corpus"')
    if errors:
        raise UserError("\n".join(errors))
    assert isinstance(run, RunSettings)
    return Recipe(path, run, stages, point, *source)


def dump_toml(table: Mapping[str, Any]) -> str:
    """TOML text of plain data. `None` values are omitted, because TOML has no null."""
    return tomli_w.dumps(_without_none(table))


def read_table(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[Path, list[str], dict[str, Any]]:
    """A recipe's file, all overrides of its table, and the table with them.

    Args:
        source: the TOML file, the directory of a run, whose record has overrides of its own, or a table.
        overrides: `--set` strings.

    Raises:
        UserError: the path is neither, its file is damaged, or an override does not fit.
    """
    file, recorded = (TABLE if isinstance(source, Mapping) else source), []
    if isinstance(source, Mapping):
        table = _without_none(source)
    elif (source / RUN_RECORD).exists():
        record = read_json(source / RUN_RECORD)
        file, recorded, table = Path(record["recipe"]), record["set"], record["table"]
    else:
        table = _read_toml(source)
    for override in overrides:
        _apply_override(table, override)
    return file, [*recorded, *overrides], table


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; `ingot init DIR` writes one to start from") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, expected a recipe file or a run; name the .toml inside it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}; fix that line") from None
    except RecursionError:
        raise UserError(f"{path}: found tables or lists nested hundreds deep, expected a recipe; fix it") from None


def _is_one_value(text: str) -> bool:
    """Whether text that is valid behind `value =` is a value and nothing else: in braces no line and comment follow."""
    try:
        return tomllib.loads(f"table = {{ value = {text.strip()} }}").keys() == {"table"}
    except tomllib.TOMLDecodeError:
        return False


def _apply_override(table: dict[str, Any], override: str) -> None:
    name, sign, text = override.partition("=")
    if not sign or not name.strip():
        raise UserError(f"--set {override}: expected NAME=VALUE, for example stage.base.seed=2")
    try:
        parsed = tomllib.loads(f"value = {text.strip()}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {"value": _plain(text.strip())}
    else:
        if not _is_one_value(text):
            raise UserError(
                f"--set {override!r}: found more than one setting, or a comment, expected one value; give each setting "
                "its own --set"
            )
    value = parsed["value"]
    *parents, leaf = _key_path(name.strip())
    stages = table.get("stage", {})
    stage = parents[1] if parents[:1] == ["stage"] and len(parents) > 1 else None
    if stage and leaf != "kind" and isinstance(stages, dict) and stage not in stages:  # setting a kind adds a stage
        raise UserError(f"--set {override}: no stage '{stage}'; {nearest(stage, stages)}")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {parent} is not a table, so it has no setting {leaf}")
    table[leaf] = value


def _plain(text: str) -> Any:
    """A number or truth value that is no TOML, as a person types it: `.001`, `1.`, `False`; else the text itself."""
    if re.fullmatch(r"[+-]?([0-9]+[.]|[.][0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return {"True": True, "False": False}.get(text, text)


def _key_path(name: str) -> list[str]:
    """The parts of a dotted key; a part may be quoted, as in TOML: sweep."stage.base.optim.lr"."""
    try:
        value: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return name.split(".")
    path: list[str] = []
    while isinstance(value, dict):
        ((part, value),) = value.items()
        path.append(part)
    return path


def _validate(model: type[Settings], body: Any, where: str, errors: list[str]) -> Settings | None:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors += problems(model, error, where)
        return None


def _without_none(value: Any) -> Any:
    """A copy as TOML would hold it: without None, tuples as lists, paths as text, numpy's scalars and arrays plain."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(k): _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value if v is not None]
    return value
