"""Running code that a model wrote: a process of its own, without network, files or children, with limits.

The child limits itself (CPU seconds, memory, no file output), leaves the network's namespace where the kernel allows,
and then puts an audit hook in front of everything that reaches out of the process: sockets, files (the standard library
may be read), new processes, ctypes. A hook cannot be taken away again. Success is a secret that the child writes after
the last test, so code that leaves early has not passed.

This keeps an accident from doing harm. It is no prison for a program that attacks the interpreter: run models that you
do not trust in a container.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass

SECONDS, MEMORY = 5, 512 << 20

_GUARD = r"""
import os, sys
secret, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
program = sys.stdin.read()
told, nothing, write = os.dup(1), os.open(os.devnull, os.O_WRONLY), os.write
os.dup2(nothing, 1)
os.dup2(nothing, 2)
import resource
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 32)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # a user's own network, with nothing in it
except (ImportError, OSError, AttributeError):
    pass
library = os.path.join(os.path.realpath(os.path.dirname(os.__file__)), "")
refused = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "pty.",
           "ctypes.", "resource.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown",
           "os.link", "os.symlink", "os.truncate", "os.chdir", "os.putenv", "signal.", "gc.", "tempfile.", "mmap.",
           "fcntl.", "syslog.", "webbrowser.", "sys._current_frames")
changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def guard(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        path, flags = arguments[0], arguments[2] if event == "open" else 0
        if not isinstance(path, str) or (flags or 0) & changing or not (path + "/").startswith(library) or ".." in path:
            raise PermissionError("files are out of reach")
    elif event.startswith(refused):
        raise PermissionError(event + " is out of reach")
sys.addaudithook(guard)
try:
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    write(told, secret.encode())
except BaseException as error:
    write(told, f"{type(error).__name__}: {error}"[:200].encode("utf-8", "replace"))
"""


@dataclass(frozen=True)
class Outcome:
    """What came of running a program."""

    passed: bool
    why: str
    """Its error, or what stopped it; empty where it passed."""


def run_code(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> Outcome:
    """Run a Python program with its tests at the end.

    Args:
        program: source; it passes by coming to its end.
        seconds: CPU time; the clock may show twice as much and one second more.
        memory: bytes of address space.
    """
    secret = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", "-c", _GUARD, secret, str(seconds), str(memory)]
    with tempfile.TemporaryDirectory() as nowhere:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=nowhere,
            env={"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            told, _ = child.communicate(program.encode("utf-8", "replace"), timeout=2 * seconds + 1)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(False, f"took longer than {2 * seconds + 1} seconds")
    if told == secret.encode():
        return Outcome(True, "")
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"took more than {seconds} seconds of CPU")
    return Outcome(False, told.decode(errors="replace") or f"left early with exit code {child.returncode}")


_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL | re.MULTILINE)
"""A block in backticks with its language, perhaps indented, perhaps cut off at the end."""


def program_of(prompt: str, answer: str, tests: str) -> str:
    """What is run: the code of an answer (fenced, or whole functions, or what goes on from the prompt), then tests."""
    fenced = [textwrap.dedent(code) for code in _FENCE.findall(answer)]
    code = "\n".join(fenced) if fenced else answer
    if not fenced and not re.search(r"^(def|class|import|from) ", answer, re.MULTILINE):
        code = prompt + answer
    return f"{code}\n\n{tests}\n"
