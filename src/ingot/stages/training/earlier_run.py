"""Goes on from the checkpoint of another stage that was the same run up to there.

All that a run does up to a step follows from its initial model, its settings, and the batches and learning rates of
these steps. Where another stage agrees in all of them, its checkpoint is the one that this run would write: a longer
`duration`, or a corpus without a document that only later steps read, need not begin at step 1. The weights at the end
are those of a run from the start, to the bit, so this is no part of the key.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    atomic_directory,
    atomic_json,
    checkpoint_path,
    checkpoint_problem,
    checkpoint_steps,
    read_json,
    write_manifest,
)
from ingot.core.errors import UserError
from ingot.core.events import METRICS, read_events
from ingot.data.batches import Batch
from ingot.distributed.checkpoint import BEST
from ingot.model.config import ModelConfig
from ingot.objectives.on_policy_settings import OnPolicySettings
from ingot.stages.job import EXECUTION_FILE, TOKENIZER, Job, read_config, read_record
from ingot.stages.training.data import Data
from ingot.stages.training.phases import rows_per_draw
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.stages.training.trace import open_training_data
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.train.settings import EvaluateSettings

COMPARED = ("duration", "phases", "evaluate")
"""Settings that may differ: what they mean for a step is compared, or they do not change the weights."""
COMPARED_OPTIM = ("schedule", "warmup", "min_ratio", "decay_steps", "cooldown", "cooldown_shape")
"""Settings of the optimizer that may differ: they are compared as learning rates."""
CONTINUED = ("step", "sample", "skipped", "rollback", "health")
"""Events that the log of this run begins with."""
MEASURED = ("evaluation", "parts")
"""Those that it also begins with if both runs measure the same rows; otherwise it measures where it goes on."""


@dataclass(frozen=True)
class _EarlierRun:
    """A checkpoint of another stage that is also one of this run."""

    stage: Path
    step: int
    same_rows: bool
    """Whether both runs are measured on the same rows, so that the best weights of one are those of the other."""
    micro_batch: int
    """Rows of a micro-batch of this run."""


def go_on(job: Job, config: ModelConfig, data: Data, timeline: Timeline, micro_batch: int) -> dict[str, Any]:
    """Give a stage without a checkpoint that of an earlier run. Returns facts for the log; none if it begins anew.

    Args:
        config: the trained model.
        micro_batch: rows of a micro-batch, if this run begins anew.
    """
    if checkpoint_steps(job.out / CHECKPOINTS) or not (earlier := _find(job, config, data, timeline, micro_batch)):
        return {}
    if not _adopt(earlier, job):
        return {}
    return {"earlier_run": earlier.stage.name, "earlier_step": earlier.step}


def _find(job: Job, config: ModelConfig, data: Data, timeline: Timeline, micro_batch: int) -> _EarlierRun | None:
    """The newest checkpoint of a stage beside this one that was the same run up to it.

    Where there is none, the user is told about a run that differs only in its length or its data, and where.
    """
    own, best, why = read_record(job.out.path), None, ""
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    samples = isinstance(TrainSettings.model_validate(own["settings"]).objective, OnPolicySettings)
    for stage in sorted(job.out.path.resolve().parent.glob("train-*")):
        steps = checkpoint_steps(stage / CHECKPOINTS)
        if not steps:
            continue
        try:
            if (record := read_record(stage))["key"] == own["key"] or not _alike(own, record):
                continue
            other_data, other, other_tokenizer = open_training_data(stage)
            if not _is_same_model(config, read_config(stage)):
                continue
            other_micro_batch = read_json(stage / EXECUTION_FILE)["micro_batch"]
        except (UserError, OSError):
            continue  # damaged, or its data is gone
        if other_tokenizer.fingerprint != tokenizer.fingerprint and (
            samples or other_tokenizer.vocab != tokenizer.vocab
        ):
            continue  # another model, or other texts of the same ids
        same_data = _data(own) == _data(record)
        differs, difference = _first_difference((data, timeline), (other_data, other), max(steps), same_data)
        alike = timeline.largest == other.largest  # then the micro-batch of the other run is taken over
        if not alike:
            each = rows_per_draw(TrainSettings.model_validate(own["settings"]))
            theirs, ours = (
                _pass_rows(line, rows, differs - 1, each)
                for line, rows in ((other, other_micro_batch), (timeline, micro_batch))
            )
            if theirs != ours:
                differs, difference = 0, f"its passes have {_listed(theirs)} rows, here {_listed(ours)}"
        step = next((s for s in steps if s < differs and _usable(checkpoint_path(stage / CHECKPOINTS, s), differs)), 0)
        if step > (best.step if best else 0):
            settings = EvaluateSettings.model_validate(record["settings"]["evaluate"])
            same_sample = own["settings"]["evaluate"]["tokens"] == settings.tokens and other.context == timeline.context
            rows = other_micro_batch if alike else micro_batch
            best = _EarlierRun(stage, step, same_data and same_sample, rows)
        elif not step and difference:
            why = f"starting at step 1: {stage.name} is the same but for its length or data, and {difference}"
    if why and not best:
        job.display.notify(why)
    return best


def _pass_rows(timeline: Timeline, micro_batch: int, last: int, each: int) -> list[int]:
    """Rows of a forward pass in each phase up to a step: sums of other passes are rounded otherwise.

    Args:
        micro_batch: rows of a micro-batch of the longest rows (`Execution.rows`).
        each: rows of a pass for each row that is drawn.
    """
    return [
        timeline.pass_rows(phase, micro_batch, timeline.rows(min(phase.last, last)) * each)
        for phase in timeline.phases
        if phase.first <= last
    ]


def _listed(rows: list[int]) -> str:
    return " and ".join(f"{n:,}" for n in rows)


def _adopt(earlier: _EarlierRun, job: Job) -> bool:
    """Copy the checkpoint, and the log up to it without evaluations on rows that this run does not measure.

    Returns whether it could be read.
    """
    source, target = earlier.stage / CHECKPOINTS, job.out / CHECKPOINTS
    try:
        state = read_json(checkpoint_path(source, earlier.step) / STATE)
        changes = {} if _copy_best(earlier, state, target) else {"best_step": 0, "best_val": None}
        if not earlier.same_rows:
            changes["evaluated"] = None
        execution = read_json(earlier.stage / EXECUTION_FILE)
        atomic_json(job.out / EXECUTION_FILE, {**execution, "micro_batch": earlier.micro_batch})
        events = read_events(earlier.stage / METRICS)
        # the checkpoint comes last: a run that is killed before it begins this anew
        with _copied(checkpoint_path(source, earlier.step), checkpoint_path(target, earlier.step), changes):
            for event in events:
                if _continues(event, earlier):
                    job.log.write(**{name: value for name, value in event.items() if name not in ("time", "attempt")})
            job.log.flush()
    except OSError:  # deleted just now by the run that wrote them, or damaged
        return False
    job.display.notify(f"going on from step {earlier.step:,} of {earlier.stage.name}, which was the same up to there")
    return True


def _continues(event: Mapping[str, Any], earlier: _EarlierRun) -> bool:
    """Whether an event belongs into the log of this run."""
    names = (*CONTINUED, *MEASURED) if earlier.same_rows else CONTINUED
    if event["event"] not in names or event["step"] > earlier.step:
        return False
    return event["event"] != "parts" or event["step"] == 0  # those of its end are not of this run's end


def _copy_best(earlier: _EarlierRun, state: Mapping[str, Any], target: Path) -> bool:
    """Whether the best weights so far are known. They are copied if there are any."""
    source = earlier.stage / CHECKPOINTS / BEST
    if not earlier.same_rows or state["best_val"] is None:
        return earlier.same_rows
    try:
        if read_json(source / STATE)["best_step"] != state["best_step"]:
            return False  # better ones came later
        with _copied(source, target / BEST, {}):
            return True
    except OSError:
        return False


def _alike(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records are of train stages with the same settings and inputs, files that settings name included, but
    for what is compared by step."""
    same = all(own[name] == other.get(name) for name in ("kind", "version", "seed", "raw"))
    return same and _fixed(own) == _fixed(other)


def _is_same_model(own: ModelConfig, other: ModelConfig) -> bool:
    """Whether two models have the same weights, if they are initialised alike: learned positions follow the context."""
    return own == (other if own.positions == "learned" else other.model_copy(update={"context": own.context}))


def _fixed(record: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in record["canonical"].items() if name not in COMPARED}
    settings["optim"] = {name: value for name, value in settings["optim"].items() if name not in COMPARED_OPTIM}
    inputs = {role: i["key"] for role, i in record["inputs"].items() if not role.startswith(("data:", "tokenizer"))}
    return {**settings, "inputs": inputs, "corpora": sorted(_data(record))}


def _data(record: Mapping[str, Any]) -> dict[str, str]:
    return {role: i["key"] for role, i in record["inputs"].items() if role.startswith("data:")}


def _usable(checkpoint: Path, differs: int) -> bool:
    """Whether a checkpoint is intact, and says nothing of steps that differ: a run that went back left some out."""
    if checkpoint_problem(checkpoint):
        return False
    return all(last < differs for _, last in read_json(checkpoint / STATE)["guard"]["left_out"])


def _first_difference(
    own: tuple[Data, Timeline], other: tuple[Data, Timeline], last: int, same_data: bool
) -> tuple[int, str]:
    """The first step that differs, and in what; the step after `last` and "" if none does."""
    for step in range(1, min(last, own[1].steps, other[1].steps) + 1):
        lrs = [timeline.lr(step) for _, timeline in (own, other)]
        if lrs[0] != lrs[1]:
            return step, f"its learning rate of step {step:,} is {lrs[1]:.3g}, here {lrs[0]:.3g}"
        (phase, *rows), (other_phase, *other_rows) = (timeline.at(step) for _, timeline in (own, other))
        alike = [(p.name, p.first, p.context) for p in (phase, other_phase)]
        same_rows = all(map(np.array_equal, rows, other_rows))
        if not same_data:
            same_rows = _same(*(data.batch(timeline, step) for data, timeline in (own, other)))
        if alike[0] != alike[1] or not same_rows:
            return step, f"its rows of step {step:,} are others"
    return min(last, own[1].steps, other[1].steps) + 1, ""


def _same(a: Batch, b: Batch) -> bool:
    """Whether training on two batches is the same. Numbers of rows may differ, since nothing is computed from them."""
    if (a.replay is None) != (b.replay is None) or (a.replay and b.replay and not _same(a.replay, b.replay)):
        return False
    if a.columns.keys() != b.columns.keys() or (a.ignore, a.group) != (b.ignore, b.group):
        return False
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("ids_BT", "labels_BT", "positions_BT", "documents_BT")]
    pairs += [(a.columns[name], b.columns[name]) for name in a.columns]
    return all(one is other if one is None or other is None else np.array_equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def _copied(source: Path, target: Path, changes: Mapping[str, Any]) -> Iterator[None]:
    """Copy a checkpoint, with changes of its state. It appears after the block.

    Raises:
        OSError: it is not intact.
    """
    with atomic_directory(target) as directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
        if problem := checkpoint_problem(directory):
            raise OSError(problem)
        if changes:
            atomic_json(directory / STATE, {**read_json(directory / STATE), **changes})
            (directory / MANIFEST).unlink()
            write_manifest(directory)
        yield
