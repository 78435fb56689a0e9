"""The process of one stage: `python -m ingot.stages.child`, with its job as JSON on standard input.

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

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends without a traceback

from ingot.core.artifact import RECORD, RESULT, StageDir, atomic_json, atomic_write
from ingot.core.dashboards import Sinks, Target
from ingot.core.errors import UserError, memory_error_message, os_error_message, print_message, show_warning
from ingot.core.events import METRICS, Display, EventLog, elapsed_seconds
from ingot.core.process import die_with_parent, handle_termination
from ingot.core.recipe import dump_toml
from ingot.stages.job import Input, Job
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
        message = _user_message(error, job)
        if message is None:
            raise
        print_message(f"{job['name']}: {message}")
        return 2
    return 0


def _user_message(error: Exception, job: dict[str, Any]) -> str | None:
    """Message of an error that the user can fix; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    return os_error_message(error, job["dir"]) or memory_error_message(error)


def run(job: dict[str, Any]) -> None:
    """Lock the stage's directory, call the kind's builder, and publish the result."""
    kind = KINDS[job["kind"]]
    out = StageDir(Path(job["dir"]))

    def on_wait(owner: str) -> None:
        print_message(f"{job['name']}: waiting for process {owner}, which is running this stage")

    with out.lock(on_wait):
        if out.is_done():
            if not job["quiet"]:
                print_message(f"{job['name']}: HIT, another process has made it")
            return
        fields = ("name", "kind", "key", "version", "seed", "settings", "canonical", "inputs", "raw", "files")
        record = {field: job[field] for field in fields}
        atomic_json(out / RECORD, record)
        atomic_write(out / "recipe.toml", dump_toml(job["recipe"]))
        log, display = EventLog(out / METRICS), Display(quiet=job["quiet"])
        earlier_seconds = elapsed_seconds(log.path)  # of interrupted attempts
        sinks = _sinks(job, log, display)
        log.listeners.append(sinks)
        log.write("start", pid=os.getpid(), python=sys.version.split()[0])
        module, function = kind.builder.split(":")
        start = time.monotonic()
        inputs = {role: Input(i["name"], i["key"], Path(job["root"]) / i["dir"]) for role, i in job["inputs"].items()}
        settings = kind.settings.model_validate(job["settings"])
        builder_job = Job(job["name"], settings, inputs, job["seed"], out, log, display)
        try:
            result = getattr(importlib.import_module(module), function)(builder_job)
        except (Exception, KeyboardInterrupt) as error:
            sinks.close(failed=True)
            if isinstance(error, Exception):
                log.write("failed", why=str(error).splitlines()[0] if str(error) else type(error).__name__)
            log.close()
            raise
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


if __name__ == "__main__":
    sys.exit(main())
