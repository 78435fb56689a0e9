"""`python -m benchmarks startup`: how long a user waits, from the command to the first step, and for an import.

The training stage is S1's, on a made-up text, and long enough that compiling is chosen where it can be; what comes
before it is finished already. Cold is an empty cache of compiled code, warm is what the cold run left. Where a machine
does not compile by itself, the two are the same, and it is told to for two more.
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

from benchmarks.contenders import Contender, Say
from ingot.core.errors import UserError
from ingot.core.events import METRICS
from ingot.stages.job import CHOICES

RECIPE = """
[run]
name = "startup"

[stage.text]
kind    = "corpus"
sources = ["text.txt"]
quality = "none"
pii     = false
holdout = { share = 0.1, by = "tail" }

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
PLAIN, TOLD = (("--set", f"stage.base.loop.backend={name}") for name in ("torch", "compiled"))
WAYS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cold", "a", ()),
    ("warm", "a", ()),
    ("told_cold", "b", TOLD),
    ("told_warm", "b", TOLD),
)
"""(name, cache, what the run is told); the last two are left out where it compiles by itself."""
STATEMENTS = {"transformers": "from transformers import LlamaForCausalLM, Trainer"}
"""What importing means where the bare name imports next to nothing."""
PATIENCE = 300.0
"""Seconds after which a run that takes no step is given up."""
COMMAND = (sys.executable, "-c", "from ingot.cli.app import main; main()")


def bench_startup(
    say: Say, importers: dict[str, Contender], repetitions: int, modules: tuple[str, ...] = ("numpy", "torch")
) -> dict[str, Any]:
    """Seconds to the first step, cold and warm, and seconds of imports (the shortest of `repetitions`)."""
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
        work = Path(name)
        letters = random.Random(1).choices("etaoin shrdlu\n", k=400_000)
        (work / "text.txt").write_text("".join(letters))
        (work / "startup.toml").write_text(RECIPE)
        say("making the stages before training")
        done = subprocess.run(
            [*COMMAND, "run", "startup.toml", "--only", "chars"], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"startup: the stages before training failed: {done.stderr.strip().splitlines()[-1]}")
        first_step(work, work / "cache-0", PLAIN)  # makes what is made once, such as the tokenized text
        rows: dict[str, Any] = {}
        for name, cache, told in WAYS:
            if told and rows.get("compiles_by_itself"):
                continue
            _forget(work)
            rows[f"first_step_{name}_s"] = seconds = round(first_step(work, work / f"cache-{cache}", told), 2)
            say(f"first step, {name.replace('_', ' to compile, ')}: {seconds} s")
            execution = json.loads((_stage(work) / CHOICES).read_text())
            rows.setdefault("compiles_by_itself", execution.get("backend") == "compiled")
    rows["imports_s"] = imports(say, importers, repetitions, modules)
    return rows


def first_step(work: Path, cache: Path, more: tuple[str, ...] = ()) -> float:
    """Seconds from the command to its first finished training step; the run is then stopped."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "INGOT_CACHE": str(cache)}
    began, wall = time.monotonic(), time.time()
    process = subprocess.Popen(
        [*COMMAND, "run", "startup.toml", *more],
        cwd=work,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while time.monotonic() - began < PATIENCE:
            if (step := _first_event(work)) is not None:
                return step - wall
            if process.poll() is not None:
                assert process.stderr
                raise UserError(f"startup: the run ended early: {process.stderr.read().strip().splitlines()[-1:]}")
            time.sleep(0.05)
        raise UserError(f"startup: no step within {PATIENCE:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def imports(say: Say, importers: dict[str, Contender], repetitions: int, modules: tuple[str, ...]) -> dict[str, float]:
    """Module -> seconds of a process that imports it and ends, the shortest."""
    found = {}
    plain = {module: (sys.executable, module) for module in (*modules, "ingot.cli.app", "ingot.stages.training.build")}
    theirs = {name: (contender.command[0], name) for name, contender in importers.items()}
    for name, (python, module) in {**plain, **theirs}.items():
        times = []
        for _ in range(repetitions):
            began = time.monotonic()
            subprocess.run([python, "-c", STATEMENTS.get(module, f"import {module}")], capture_output=True, check=True)
            times.append(time.monotonic() - began)
        found[name] = round(min(times), 3)
        say(f"import {name}: {found[name]} s")
    return found


def _stage(work: Path) -> Path:
    return work / "runs" / "startup" / "base"


def _forget(work: Path) -> None:
    """Let the training stage begin anew; the stages before it stay."""
    shutil.rmtree(_stage(work).resolve())


def _first_event(work: Path) -> float | None:
    """When the first step was logged, by the wall clock."""
    path = _stage(work) / METRICS
    if not path.exists():
        return None
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that is being written
            event = json.loads(text)
            if event["event"] == "step":
                return float(event["time"])
    return None
