"""`python -m benchmarks startup`: seconds from the command to the first training step, and seconds of imports.

The train stage has shape S1 and random text, and enough steps that the backend `compiled` is selected if it is
available; the stages before it have finished. A cold start has an empty cache of compiled code, a warm start uses the
cache of the cold one. If the machine does not select `compiled` by default, both are also measured with that backend.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender, Log
from ingot.core.errors import UserError
from ingot.core.events import METRICS
from ingot.stages.job import EXECUTION_FILE

RECIPE = """
[run]
name = "startup"

[stage.text]
kind    = "corpus"
sources = ["text.txt"]
quality = "none"
pii     = false
holdout = { fraction = 0.1, by = "tail" }

[stage.chars]
kind = "tokenizer"
from = "text"
type = "char"

[stage.base]
kind      = "train"
data      = { text = 1.0 }
tokenizer = "chars"
model     = { depth = 4, width = 128, heads = 4, context = 64, tied = true }
batch     = 64
duration  = "100000 steps"
loop      = { log_every = 1 }
"""
TORCH, COMPILED = (("--set", f"stage.base.loop.backend={name}") for name in ("torch", "compiled"))
"""Arguments that select a backend."""
SCENARIOS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cold", "a", ()),
    ("warm", "a", ()),
    ("told_cold", "b", COMPILED),
    ("told_warm", "b", COMPILED),
)
"""(name, cache directory, arguments of the run); the last two are skipped if the first one already compiled."""
IMPORT_STATEMENTS = {"transformers": "from transformers import LlamaForCausalLM, Trainer"}
"""Import statements of packages that load their modules lazily."""
TIMEOUT = 300.0
"""Seconds to wait for the first step."""
COMMAND = (sys.executable, "-c", "from ingot.cli.app import main; main()")


def bench_startup(
    log: Log, importers: dict[str, Contender], repetitions: int, modules: tuple[str, ...] = ("numpy", "torch")
) -> dict[str, Any]:
    """Measure the seconds to the first step, cold and warm, and the seconds of imports (the shortest of several).

    Args:
        importers: a peer's module -> a contender of that peer, whose interpreter imports it.
        repetitions: number of imports.
        modules: further modules that our interpreter imports.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
        work = Path(name)
        letters = random.Random(1).choices("etaoin shrdlu\n", k=400_000)
        (work / "text.txt").write_text("".join(letters))
        (work / "startup.toml").write_text(RECIPE)
        log("running the stages before training")
        done = subprocess.run(
            [*COMMAND, "run", "startup.toml", "--only", "chars"], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"startup: the stages before training failed: {done.stderr.strip().splitlines()[-1]}")
        first_step(work, work / "cache-0", TORCH)  # also tokenizes the text, once for all scenarios
        rows: dict[str, Any] = {}
        for name, cache, arguments in SCENARIOS:
            if arguments and rows.get("compiles_by_itself"):
                continue
            _delete_stage(work)
            rows[f"first_step_{name}_s"] = seconds = round(first_step(work, work / f"cache-{cache}", arguments), 2)
            log(f"first step, {name.replace('told_', 'backend compiled, ')}: {seconds} s")
            execution = json.loads((_stage(work) / EXECUTION_FILE).read_text())
            rows.setdefault("compiles_by_itself", execution.get("backend") == "compiled")
    rows["imports_s"] = imports(log, importers, repetitions, modules)
    return rows


def first_step(work: Path, cache: Path, arguments: tuple[str, ...] = ()) -> float:
    """Seconds from the start of `ingot run` to its first finished training step; the run is then killed.

    Args:
        work: directory with the recipe.
        cache: directory of compiled code.
        arguments: further arguments of the command.
    """
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "INGOT_CACHE": str(cache)}
    start, wall_start = time.monotonic(), time.time()
    process = subprocess.Popen(
        [*COMMAND, "run", "startup.toml", *arguments],
        cwd=work,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while time.monotonic() - start < TIMEOUT:
            if (step := _first_event(work)) is not None:
                return step - wall_start
            if process.poll() is not None:
                assert process.stderr
                raise UserError(f"startup: the run ended early: {process.stderr.read().strip().splitlines()[-1:]}")
            time.sleep(0.05)
        raise UserError(f"startup: no step within {TIMEOUT:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def imports(log: Log, importers: dict[str, Contender], repetitions: int, modules: tuple[str, ...]) -> dict[str, float]:
    """Module -> seconds of a process that only imports it, the shortest of several."""
    seconds = {}
    ours = {module: (sys.executable, module) for module in (*modules, "ingot.cli.app", "ingot.stages.training.build")}
    theirs = {name: (contender.command[0], name) for name, contender in importers.items()}
    for name, (python, module) in {**ours, **theirs}.items():
        statement = IMPORT_STATEMENTS.get(module, f"import {module}")
        times = []
        for _ in range(repetitions):
            start = time.monotonic()
            subprocess.run([python, "-c", statement], capture_output=True, check=True)
            times.append(time.monotonic() - start)
        seconds[name] = round(min(times), 3)
        log(f"import {name}: {seconds[name]} s")
    return seconds


def _stage(work: Path) -> Path:
    return work / "runs" / "startup" / "base"


def _delete_stage(work: Path) -> None:
    """Delete the train stage, so that it starts again; the stages before it stay."""
    shutil.rmtree(_stage(work).resolve())


def _first_event(work: Path) -> float | None:
    """The wall-clock time at which the first step was logged; None before that."""
    path = _stage(work) / METRICS
    if not path.exists():
        return None
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that is being written
            event = json.loads(text)
            if event["event"] == "step":
                return float(event["time"])
    return None
