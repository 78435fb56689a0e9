"""The process of one stage: `python -m ingot.stages`, with its job as JSON on standard input.

The process ends with its parent, holds the lock of the stage's directory, and publishes the result at the end. Exit
code 2 means an error that the user can fix (one message on standard error), 1 means a bug.
"""

import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from ingot.core.artifact import RECORD, RESULT, StageDir, atomic_json, atomic_write
from ingot.core.dashboards import Sinks, Target
from ingot.core.errors import UserError, memory_error_message, os_error_message, print_message, show_warning
from ingot.core.events import METRICS, Display, EventLog, elapsed_seconds
from ingot.core.process import die_with_parent, handle_termination
from ingot.core.ranks import LOST_PEER, Rank, RankFailure, first_failure, log_file, own_rank, record_failure
from ingot.core.recipe import dump_toml
from ingot.distributed.group import agreed, joined, lost_peer, meet
from ingot.stages.job import Input, Job
from ingot.stages.kind import Kind
from ingot.stages.kinds import KINDS


def main() -> int:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    die_with_parent(job["parent"])
    warnings.showwarning = show_warning
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        handle_termination(signal.default_int_handler)
        run(job)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if lost_peer(error):
            return LOST_PEER
        message = _user_message(error, job)
        if message is None:
            raise
        first = first_failure(Path(job["dir"]))
        if first is None or first.rank == own_rank().number:  # the others most often have the same error
            print_message(f"{job['name']}: {message}")
        return 2
    return 0


def _user_message(error: Exception, job: dict[str, Any]) -> str | None:
    """Message of an error that the user can fix; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    return os_error_message(error, job["dir"]) or memory_error_message(error)


def run(job: dict[str, Any]) -> None:
    """Lock the stage's directory, call the kind's builder, and publish the result.

    Ranks other than the first write only a log of their own and their parts of checkpoints.
    """
    kind = KINDS[job["kind"]]
    out = StageDir(Path(job["dir"]))

    def on_wait(owner: str) -> None:
        print_message(f"{job['name']}: waiting for process {owner}, which is running this stage")

    with joined(out.path, job["settings"].get("loop", {}).get("device", "cpu")) as rank:
        if rank.leads:
            with out.lock(on_wait):
                if not agreed(out.is_done):
                    _lead(job, kind, out, rank)
                elif not job["quiet"]:
                    print_message(f"{job['name']}: HIT, another process has made it")
        elif not agreed(out.is_done):
            _follow(job, kind, out, rank)


def _follow(job: dict[str, Any], kind: Kind, out: StageDir, rank: Rank) -> None:
    """Take part in a stage that the first rank leads."""
    log = EventLog(log_file(out.path, rank.number))
    log.write("start", pid=os.getpid(), python=sys.version.split()[0])
    try:
        _build(job, kind, out, log, Display(quiet=True))
        log.write("end")
    except Exception as error:
        log.write("failed", why=_why(error, out, rank))
        raise
    finally:
        log.close()
    meet()


def _build(job: dict[str, Any], kind: Kind, out: StageDir, log: EventLog, display: Display) -> dict[str, Any]:
    module, function = kind.builder.split(":")
    inputs = {role: Input(i["name"], i["key"], Path(job["root"]) / i["dir"]) for role, i in job["inputs"].items()}
    settings = kind.settings.model_validate(job["settings"])
    return getattr(importlib.import_module(module), function)(
        Job(job["name"], settings, inputs, job["seed"], out, log, display)
    )


def _why(error: Exception, out: StageDir, rank: Rank) -> str:
    """The first line of an error; of a rank that only lost another one, the other one's."""
    if lost_peer(error):
        first = first_failure(out.path)
        return f"rank {first.rank}: {first.why}" if first else "another rank ended"
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    if rank.size > 1:
        record_failure(out.path, RankFailure(rank.number, why))
    return why


def _lead(job: dict[str, Any], kind: Kind, out: StageDir, rank: Rank) -> None:
    """Build a stage, with the log and the display that the user sees, and publish its result."""
    fields = ("name", "kind", "key", "version", "seed", "settings", "canonical", "inputs", "raw", "files")
    record = {field: job[field] for field in fields}
    atomic_json(out / RECORD, record)
    atomic_write(out / "recipe.toml", dump_toml(job["recipe"]))
    log, display = EventLog(out / METRICS), Display(quiet=job["quiet"])
    earlier_seconds = elapsed_seconds(log.path)  # of interrupted attempts
    sinks = _sinks(job, log, display)
    log.listeners.append(sinks)
    log.write("start", pid=os.getpid(), python=sys.version.split()[0])
    start = time.monotonic()
    try:
        result = _build(job, kind, out, log, display)
    except (Exception, KeyboardInterrupt) as error:
        sinks.close(failed=True)
        if isinstance(error, Exception):
            log.write("failed", why=_why(error, out, rank))
        log.close()
        raise
    meet()  # the other ranks have closed their logs, which are digested
    seconds = round(earlier_seconds + time.monotonic() - start, 3)
    result = {**result, "seconds": seconds}
    sinks.close(failed=False)
    log.write("end", seconds=seconds)
    log.close()
    atomic_json(out / RESULT, result)
    out.finish({"key": job["key"], "seconds": seconds})


def _sinks(job: dict[str, Any], log: EventLog, display: Display) -> Sinks:
    """The dashboards of the run."""
    run, _, label = job.get("link", "").partition("/")
    target = Target(Path(job["root"]), run, label, job["kind"], job["key"], job["settings"])

    def warn(text: str) -> None:
        display.notify(text)
        log.write("warning", why=text)

    return Sinks(job.get("sinks", ()), target, log.path, warn)
