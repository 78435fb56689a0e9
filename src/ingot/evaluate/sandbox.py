"""Run model-written code: a program and its tests, in two processes that are cut off from the machine.

`sandbox_process` runs in both. The tests never enter the program's process, and values are compared in theirs, so a
program can neither read the expected values nor report a success of its own.

`bwrap` (bubblewrap) is the boundary: no network, no files but the interpreter and its libraries (read-only), an empty
directory in memory, and namespaces of its own for processes, users and IPC. A filter of system calls refuses new
processes; limits bound memory, CPU time and files. Mode `weak` has the filter and the limits, but guards files only
inside the interpreter; `docs/stages/tasks.md` lists its holes.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.core.errors import UserError
from ingot.evaluate.sandbox_process import main  # which also compiles it once for all processes

MAX_SECONDS, MAX_MEMORY = 5, 512 << 20
"""Default limits of each process: seconds of CPU time, bytes of address space."""
MAX_FILES = 16 << 20
"""Bytes of all files that a program writes."""

_PROCESS = Path(main.__file__).parent
_START = f"import sys; sys.path.append(sys.argv.pop(1)); from {_PROCESS.name}.main import main; main(*sys.argv[1:])"
"""Python source of the first statements of a process; arguments: the package's directory, role and options."""

Mode = Literal["bwrap", "weak"]

_OVERTIME = {sign * number + base for number in (signal.SIGXCPU, signal.SIGKILL) for sign, base in ((-1, 0), (1, 128))}
"""Exit codes of a process that exceeded its CPU time; bwrap adds 128 to the number of a signal."""


@dataclass(frozen=True)
class Outcome:
    """The result of running a program."""

    passed: bool
    why: str
    """Its error, or the limit that it exceeded; empty if it passed."""


def run_code(
    program: str, tests: str = "", mode: Mode = "bwrap", seconds: int = MAX_SECONDS, memory: int = MAX_MEMORY
) -> Outcome:
    """Run a Python program, then tests of what it has defined.

    Args:
        program: source that a model has written.
        tests: statements that fail unless the program is right. Without tests a program passes if it says that it ran
            to its end.
        mode: `bwrap`, or `weak` for machines without it.
        seconds: limit of CPU time of each process; the limit of wall time is 2 * seconds + 1.
        memory: limit of the address space of each process in bytes.

    Raises:
        UserError: the sandbox does not work on this machine.
    """
    if mode == "bwrap" and (problem := bwrap_problem()):
        raise UserError(problem)
    deadline = time.monotonic() + 2 * seconds + 1
    options: dict[str, Any] = {"seconds": seconds, "memory": memory, "weak": mode == "weak", "other": []}
    replies, to_tests = os.pipe()
    requests, to_program = os.pipe()
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as errors:
        common: dict[str, Any] = {"cwd": directory, "env": {}, "stderr": errors, "start_new_session": True}
        child: subprocess.Popen[Any] = subprocess.Popen(
            _command("program", options, mode), stdin=requests, stdout=to_tests, **common
        )
        command = _command("tests", {**options, "other": [replies, to_program]}, mode)
        common |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (replies, to_program)}
        tester: subprocess.Popen[Any] = subprocess.Popen(command, **common)
        for pipe in (replies, to_tests, requests, to_program):
            os.close(pipe)
        try:
            job = json.dumps({"program": program, "tests": tests}).encode()
            reply, _ = tester.communicate(job, timeout=deadline - time.monotonic())
            verdict: dict[str, Any] = json.loads(reply or "null")
            if verdict and verdict["error"] is not None:
                return Outcome(verdict["passed"], verdict["error"])
            codes = [child.wait(deadline - time.monotonic()), tester.returncode]
        except subprocess.TimeoutExpired:
            return Outcome(False, f"took longer than {2 * seconds + 1} seconds")
        finally:
            for process in (child, tester):
                process.kill()  # which ends all that runs inside of bwrap too
                process.communicate()
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    if message:
        raise UserError(f"the sandbox for code failed ({message.splitlines()[-1]}); {_REMEDY}")
    if _OVERTIME.intersection(codes):
        return Outcome(False, f"took more than {seconds} seconds of CPU")
    return Outcome(False, f"exited early with code {codes[0]}")


_REMEDY = 'install bubblewrap 0.7 or newer and allow user namespaces, or set sandbox = "weak" (its holes: tasks.md)'


@functools.cache
def bwrap_problem() -> str | None:
    """Why code cannot be run in `bwrap` on this machine, with a remedy; None where it works (it is tried once)."""
    if not shutil.which("bwrap"):
        return f"running code needs the program bwrap, which is not installed; {_REMEDY}"
    options = {"seconds": MAX_SECONDS, "memory": MAX_MEMORY, "weak": False, "other": []}
    trial = subprocess.run(
        _command("program", options, "bwrap"), stdin=subprocess.DEVNULL, capture_output=True, text=True, env={}
    )
    if trial.returncode == 0:
        return None
    reason = trial.stderr.strip().splitlines()[-1:] or [f"exit code {trial.returncode}"]
    return f"running code needs bwrap, which does not work here ({reason[0]}); {_REMEDY}"


def _command(role: str, options: dict[str, Any], mode: Mode) -> list[str]:
    """The command of a process of the sandbox; `role` and `options` as in `sandbox_process/main.py`."""
    interpreter = os.path.realpath(sys.executable)
    python = [interpreter, "-I", "-S", "-B", "-c", _START, str(_PROCESS.parent), role, json.dumps(options)]
    if mode == "weak":
        return python
    namespaces = ["--unshare-user", "--unshare-all", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    private = ["--size", str(MAX_FILES), "--tmpfs", "/tmp", "--chdir", "/tmp", "--dev-bind", "/dev/null", "/dev/null"]
    binds = [word for path in (*_libraries(), interpreter, str(_PROCESS)) for word in ("--ro-bind", path, path)]
    lifetime = ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    bwrap = shutil.which("bwrap") or "bwrap"
    return [bwrap, *namespaces, *lifetime, *private, *binds, "--remount-ro", "/", *python]


@functools.cache
def _libraries() -> list[str]:
    """Directories with the standard library and shared libraries."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    paths += [str(Path(root) / name) for root in ("/", "/usr", sys.base_prefix) for name in ("lib", "lib64")]
    return [path for path in dict.fromkeys(paths) if Path(path).is_dir()]


_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced code block with an optional language; it may be indented, and cut off at the end of the answer."""


def program_of(prompt: str, answer: str) -> str:
    """The code of an answer: its fenced blocks if there are any; else the answer itself if it defines or imports
    something; else the answer as a continuation of the prompt."""
    fenced = [textwrap.dedent(code) for code in _FENCE.findall(answer)]
    if fenced:
        return "\n".join(fenced)
    return answer if re.search(r"^(def|class|import|from) ", answer, re.MULTILINE) else prompt + answer
