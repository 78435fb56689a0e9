"""The process that runs one stage: `python -m ingot.stages.child`, its job as JSON on standard input.

It dies with its parent, holds the directory's lock, and ends by publishing the result. Exit code 2 is the user's to
mend (one sentence on standard error), 1 is ours.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is still being imported ends without a word

from ingot.core.artifact import RECORD, RESULT, StageDir, atomic_json, atomic_write
from ingot.core.dashboards import Sinks, Target
from ingot.core.errors import UserError, no_memory, refused
from ingot.core.events import METRICS, Display, EventLog, spent
from ingot.core.process import die_with, on_ending
from ingot.core.recipe import dump_toml
from ingot.stages.job import Input, Job
from ingot.stages.kinds import KINDS


def main() -> int:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    die_with(job["parent"])
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        on_ending(signal.default_int_handler)
        run(job)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sentence = _sentence(error, job)
        if sentence is None:
            raise
        print(f"{job['name']}: {sentence}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: Exception, job: dict[str, Any]) -> str | None:
    """What the user can mend; None where the error is ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return refused(error, job["dir"])
    return no_memory(error)


def run(job: dict[str, Any]) -> None:
    """Lock, build, publish."""
    kind = KINDS[job["kind"]]
    out = StageDir(Path(job["dir"]))
    with out.lock():
        if out.is_done():  # another process was faster
            return
        record = {
            k: job[k] for k in ("name", "kind", "key", "version", "seed", "settings", "canonical", "inputs", "raw")
        }
        atomic_json(out / RECORD, record)
        atomic_write(out / "recipe.toml", dump_toml(job["recipe"]))
        log, display = EventLog(out / METRICS), Display(quiet=job["quiet"])
        before = spent(log.path)  # by attempts that were interrupted
        sinks = _sinks(job, log, display)
        log.listeners.append(sinks)
        log.write("start", pid=os.getpid(), python=sys.version.split()[0])
        module, function = kind.builder.split(":")
        began = time.monotonic()
        inputs = {role: Input(i["name"], i["key"], Path(job["root"]) / i["dir"]) for role, i in job["inputs"].items()}
        settings = kind.settings.model_validate(job["settings"])
        built = Job(job["name"], settings, inputs, job["seed"], out, log, display)
        try:
            result = getattr(importlib.import_module(module), function)(built)
        except (Exception, KeyboardInterrupt) as error:
            sinks.close(failed=True)
            if isinstance(error, Exception):
                log.write("failed", why=str(error).splitlines()[0] if str(error) else type(error).__name__)
            log.close()
            raise
        seconds = round(before + time.monotonic() - began, 3)
        result = {**result, "seconds": seconds}
        sinks.close(failed=False)
        log.write("end", seconds=seconds)
        log.close()
        atomic_json(out / RESULT, result)
        out.finish({"key": job["key"], "seconds": seconds})


def _sinks(job: dict[str, Any], log: EventLog, display: Display) -> Sinks:
    """The dashboards that the run asks for."""
    run, _, label = job.get("place", "").partition("/")
    target = Target(Path(job["root"]), run, label, job["kind"], job["key"], job["settings"])

    def warn(text: str) -> None:
        display.say(text)
        log.write("warning", why=text)

    return Sinks(job.get("sinks", ()), target, log.path, warn)


if __name__ == "__main__":
    sys.exit(main())
