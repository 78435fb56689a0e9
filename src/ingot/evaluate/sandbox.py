"""Run model-written code in a child process without network, files or subprocesses, with resource limits.

The child first limits its CPU time, memory and file output, and leaves the network namespace if the kernel permits.
It then installs an audit hook, which cannot be removed, that rejects sockets, new processes, ctypes, and all files but
the standard library. To report success the child writes a secret after the last test, so code that exits early does not
pass.

This prevents accidental damage, not attacks on the interpreter: run untrusted models in a container.
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

MAX_SECONDS, MAX_MEMORY = 5, 512 << 20
"""Default limits: seconds of CPU time, bytes of address space."""

_GUARD = r"""
import os, sys
secret, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
program = sys.stdin.read()
reply, devnull, write = os.dup(1), os.open(os.devnull, os.O_WRONLY), os.write
os.dup2(devnull, 1)
os.dup2(devnull, 2)
import resource
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 32)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET: a namespace without network
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
    write(reply, secret.encode())
except BaseException as error:
    write(reply, f"{type(error).__name__}: {error}"[:200].encode("utf-8", "replace"))
"""
"""The child's program; its arguments are the secret and the limits, its input the code to run."""


@dataclass(frozen=True)
class Outcome:
    """The result of running a program."""

    passed: bool
    why: str
    """Its error, or the limit that it exceeded; empty if it passed."""


def run_code(program: str, seconds: int = MAX_SECONDS, memory: int = MAX_MEMORY) -> Outcome:
    """Run a Python program with its tests at the end.

    Args:
        program: source; it passes if it runs to its end.
        seconds: limit of CPU time; the limit of wall time is 2 * seconds + 1.
        memory: limit of the address space in bytes.
    """
    secret = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", "-c", _GUARD, secret, str(seconds), str(memory)]
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            reply, _ = child.communicate(program.encode("utf-8", "replace"), timeout=2 * seconds + 1)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(False, f"took longer than {2 * seconds + 1} seconds")
    if reply == secret.encode():
        return Outcome(True, "")
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"took more than {seconds} seconds of CPU")
    return Outcome(False, reply.decode(errors="replace") or f"exited early with code {child.returncode}")


_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced code block with an optional language; it may be indented, and cut off at the end of the answer."""


def program_of(prompt: str, answer: str, tests: str) -> str:
    """The program to run: the code of an answer, then the tests.

    The code is the answer's fenced blocks if there are any; else the answer itself if it defines or imports something;
    else the answer as a continuation of the prompt.
    """
    fenced = [textwrap.dedent(code) for code in _FENCE.findall(answer)]
    code = "\n".join(fenced) if fenced else answer
    if not fenced and not re.search(r"^(def|class|import|from) ", answer, re.MULTILINE):
        code = prompt + answer
    return f"{code}\n\n{tests}\n"
