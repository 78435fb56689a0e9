"""Tricks of programs that want to pass without being right, or to reach the machine that they run on.

A forgery never computes `f(3) == 6`. A reach returns something true from `f` if it got there; `HOST` is a directory of
the machine that runs the tests, `PORT` a server of it and `PID` its process.
"""

import os

FORGERIES = {
    "secret in the arguments": """
import os, sys
for fd in range(64):
    for secret in (*sys.argv, *sys.orig_argv):
        try: os.write(fd, secret.encode())
        except OSError: pass
def f(x): return 0
""",
    "secret in the frames": """
import os, sys
def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            for fd in range(64):
                try: os.write(fd, str(value)[:2000].encode() + b"\\n")
                except OSError: pass
    return 0
""",
    "the tests in the frames": """
import re, sys
def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        if found := re.search(r"f\\(3\\) == (\\d+)", repr(frame.f_locals) + repr(frame.f_globals)): return int(found[1])
""",
    "the tests in memory": """
import gc, re
def f(x):
    for value in gc.get_objects():
        if type(value) is dict:
            for text in [*value.values()]:
                if type(text) is str and (found := re.search(r"assert f\\(\\d\\) == (\\d)", text)): return int(found[1])
""",
    "the tests in files": """
import glob, re
def f(x):
    for path in glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/environ") + glob.glob("/proc/*/fd/*"):
        try: found = re.search(r"f\\(3\\) == (\\d+)", open(path).read(10000))
        except OSError: continue
        if found: return int(found[1])
""",
    "rebinding the guards": """
import __main__, builtins
for name in ("guard", "secret", "write", "reply", "refused", "library", "MODULE", "run", "passed"):
    setattr(__main__, name, lambda *a, **k: True)
    setattr(builtins, name, True)
def f(x): return 0
""",
    "rebinding through sys.modules": """
import sys, types
for module in [*sys.modules.values()]:
    if "sandbox" in getattr(module, "__name__", ""):
        for name, value in [*vars(module).items()]:
            if isinstance(value, types.FunctionType): setattr(module, name, lambda *a, **k: {"passed": True})
def f(x): return 0
""",
    "a verdict of its own": """
import json, os
for fd in range(64):
    try: os.write(fd, json.dumps({"passed": True, "error": ""}).encode() + b"\\n")
    except OSError: pass
os._exit(0)
""",
    "leaving early": "import os; os._exit(0)",
    "leaving politely": "import sys; sys.exit(0)",
    "leaving in the test": "import os\ndef f(x): os._exit(0)",
    "closing everything": "import os; os.closerange(0, 64)\ndef f(x): return 0",
    "equal to everything": """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = object.__hash__
def f(x): return Anything()
""",
    "a number equal to everything": """
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Number(0)
""",
    "the library's equal to everything": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a class of another name": """
class Anything:
    __class__ = int
    def __eq__(self, other): return True
Anything.__module__, Anything.__qualname__ = "builtins", "list"
def f(x): return Anything()
""",
    "a metaclass that claims": """
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class f(metaclass=Meta):
    def __new__(cls, x): return cls
""",
    "asserts that do not raise": """
import builtins
builtins.AssertionError = type("Quiet", (BaseException,), {})
builtins.compile = lambda *a, **k: (lambda: None).__code__
builtins.exec = builtins.eval = lambda *a, **k: None
def f(x): return 0
""",
    "another comparison": """
import operator, json
operator.eq = operator.__eq__ = lambda a, b: True
json.loads = lambda *a, **k: ["result", "", 6, ["builtins.tuple"]]
def f(x): return 0
""",
    "a trace of the tests": """
import sys, re
seen = []
def trace(frame, event, argument):
    if frame.f_code.co_filename == "tests": seen.append(repr(frame.f_locals))
sys.settrace(trace)
sys.setprofile(trace)
def f(x):
    found = re.search(r"f\\(3\\) == (\\d+)", "".join(seen))
    return int(found[1]) if found else 0
""",
    "a forged reply": """
import os
for fd in range(3, 64):
    for line in (b'["result", "", null, ["builtins.tuple", "0"]]', b'["result", "", ["library", "math", "inf"], []]'):
        try: os.write(fd, line + b"\\n")
        except OSError: pass
def f(x): return 0
""",
    "a forged operation": """
import os
for fd in range(3, 64):
    for operation in ('["request", "run", ["builtins.tuple", "import os; os._exit(0)"]]',
                      '["request", "getattr", ["builtins.tuple", ["yours", 0], "__globals__"]]'):
        try: os.write(fd, operation.encode() + b"\\n")
        except OSError: pass
def f(x): return 0
""",
    "an exception of the tests' process": """
class Disconnected(BaseException): pass
Disconnected.__module__ = "sandbox_process.remote"
def f(x): raise Disconnected
""",
    "at exit": """
import atexit, os, threading
def forge(*_):
    for fd in range(64):
        try: os.write(fd, b'{"passed": true, "error": ""}')
        except OSError: pass
atexit.register(forge)
threading.Thread(target=lambda: [forge() for _ in range(5)], daemon=True).start()
def f(x): return 0
""",
}
"""Programs for the test `assert f(3) == 6`."""

OTHER_FORGERIES = [
    ("def f(x): return 0\ndef abs(x): return 0\n", "assert abs(f(3) - 6) < 1e-9"),
    (
        "class N:\n  def __sub__(s, o): return s\n  def __abs__(s): return 0.0\ndef f(x): return N()",
        "assert abs(f(3) - 6) < 1",
    ),
    ("class N:\n  def __lt__(s, o): return True\n  __gt__ = __lt__\ndef f(x): return N()", "assert 5 < f(3) < 7"),
    ("class N:\n  def __eq__(s, o): return True\ndef f(x): return [N(), N()]", "assert f(3) == [1, 2]"),
    ("class N:\n  __class__ = int\ndef f(x): return N()", "assert isinstance(f(3), int)"),
    ("import cmath as isinstance\ndef f(x): return 0", "assert isinstance(f(3), str)"),
    ("class L(list):\n  def __eq__(s, o): return True\ndef f(x): return L([9])", "assert f(3) == [1, 2]"),
    ("def f(g): return g.__globals__['seen']", "seen = 6\ndef g(): pass\nassert f(g) == 6"),
    ("def f(g): return g.gi_frame.f_globals['seen']", "seen = 6\nassert f(x for x in [1]) == 6"),
]

CONNECT = "import socket\ndef f():\n s = socket.socket({family})\n s.settimeout(1)\n s.connect({address})\n return 1\n"
CALL = """
import ctypes
def f():
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.{call} >= 0 or ctypes.get_errno() != 1
"""
"""A system call that does nothing even where it is allowed; the filter refuses it with EPERM = 1."""
ADD_KEY = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine)

REACHES = {
    "a file": "def f(): return open('HOST/secret').read()",
    "a list of files": "import os\ndef f(): return os.listdir('HOST')",
    "a new file": "def f(): open('HOST/new', 'w').close(); return 1",
    "a file behind a link": "import os\ndef f(): os.symlink('HOST/secret', 'link'); return open('link').read()",
    "a new database": "import sqlite3\ndef f(): return sqlite3.connect('HOST/new').execute('create table t (x)')",
    "a module under another name": """
import glob, importlib.util, os
def f():
    for path in glob.glob(os.path.dirname(os.__file__) + "/lib-dynload/_ctypes.*"):
        spec = importlib.util.spec_from_file_location("x._ctypes", path)
        module = importlib.util.module_from_spec(spec)
        return module.dlopen(None, 0) and open("HOST/secret")
""",
    "a frame": "def f():\n frame = (x for x in [1]).gi_frame\n open('HOST/secret')\n return frame",
    "a file through C": "import ctypes\ndef f(): return ctypes.CDLL(None).open(b'HOST/secret', 0) >= 0",
    "the users": "def f(): return open('/etc/passwd').read()",
    "the library's files": "import os\ndef f():\n with open(os.__file__, 'a') as file: return file.writable()",
    "installed packages": "def f(): import numpy; return 1",
    "the environment": "import os\ndef f(): return os.environ['SECRET']",
    "the environment of others": "def f(): return open('/proc/PID/environ').read()",
    "the files of another process": "import os\ndef f(): return os.listdir('/proc/PID/root')",
    "a server": CONNECT.format(family="socket.AF_INET", address="('127.0.0.1', PORT)"),
    "a server through C": CALL.format(call="socket(2, 1, 0)"),
    "a local socket": CONNECT.format(family="socket.AF_UNIX", address="'HOST/socket'"),
    "an abstract socket": CONNECT.format(family="socket.AF_UNIX", address="'\\0ingot-PID'"),
    "a shell": "import os\ndef f(): return os.system('true') == 0",
    "a subprocess": "import subprocess, sys\ndef f(): return subprocess.run([sys.executable, '-V']).returncode == 0",
    "a shell by fork_exec": """
import _posixsubprocess, os, sys
def f():
    pipe = os.pipe()
    rest = (-1, -1, -1, -1, -1, -1, *pipe, True, False, -1, None, None, None, -1, None)
    arguments = ([b"/bin/sh", b"-c", b"true"], [b"/bin/sh"], True, (pipe[1],), None, None, *rest)
    return _posixsubprocess.fork_exec(*arguments, *[True] * (sys.version_info < (3, 14))) > 0
""",
    "a fork": "import os\ndef f():\n if pid := os.fork(): return pid\n os._exit(0)",
    "a fork through C": """
import ctypes, os
def f():
    pid = ctypes.CDLL(None).fork()
    return pid > 0 if pid else os._exit(0)
""",
    "a spawned process": "import os, sys\ndef f(): return os.posix_spawn(sys.executable, [sys.executable, '-V'], {})",
    "another program": "import os, sys\ndef f(): os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "a program in memory": CALL.format(
        call="execveat(ctypes.CDLL(None).memfd_create(b'x', 0), b'', None, None, 0x1000)"
    ),
    "worker processes": "import multiprocessing as m\ndef f(): m.get_context('fork').Process().start(); return 1",
    "a signal to the parent": "import os\ndef f(): os.kill(os.getppid(), 0); return 1",
    "a signal to another process": "import os\ndef f(): os.kill(PID, 0); return 1",
    "a signal to all": "import os\ndef f(): os.kill(-1, 0); return 1",
    "a trace of others": CALL.format(call="ptrace(0x4200, 0, 0, 0)"),
    "the memory of others": CALL.format(call="process_vm_readv(PID, None, 0, None, 0, 0)"),
    "a handle of another process": CALL.format(call="syscall(434, PID, 0)"),
    "higher limits": "import resource\ndef f(): resource.setrlimit(resource.RLIMIT_CPU, (999, 999)); return 1",
    "namespaces": CALL.format(call="unshare(0)"),
    "mounts": CALL.format(call="mount(None, None, None, 0, None)"),
    "another root": CALL.format(call="chroot(None)"),
    "devices": CALL.format(call="mknod(None, 0o60600, 0)"),
    "the kernel's keys": CALL.format(call=f"syscall({ADD_KEY}, None, None, None, 0, 0)"),
    "another user": "import os\ndef f(): os.setuid(0); return 1",
    "memory": "def f(): return len(bytearray(900 << 20))",
    "memory by mapping": "import mmap\ndef f(): return len(mmap.mmap(-1, 900 << 20))",
    "a large file": "def f(): file = open('large', 'wb'); return [file.write(bytes(1 << 20)) for _ in range(24)]",
    "many files": "def f(): return [open(str(n), 'wb').write(bytes(1 << 20)) for n in range(24)]",
    "a thousand open files": "import os\ndef f(): return [os.pipe() for _ in range(500)]",
}
"""Programs for the test `assert f()`."""

HARMLESS = (
    *("a file", "a list of files", "the environment", "a server", "a local socket", "a shell", "a subprocess"),
    *("a shell by fork_exec", "a fork", "a fork through C", "a spawned process", "a server through C"),
)
"""Those that a test runs without a sandbox too, to see that they would get there."""

WEAK = (
    *("a new database", "a module under another name", "a frame"),
    *("a file", "a new file", "a file through C", "the environment of others", "a server", "a server through C"),
    *(
        "a shell",
        "a subprocess",
        "a shell by fork_exec",
        "a fork through C",
        "another program",
        "a signal to the parent",
    ),
    *("a trace of others", "higher limits", "memory", "memory by mapping"),
)
"""Those that weak mode holds too."""
