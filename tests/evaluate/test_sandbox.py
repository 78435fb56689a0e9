"""Code that a model wrote: right code passes, wrong code fails, and neither reaches anything."""

import pytest

from ingot.evaluate.sandbox import program_of, run_code
from ingot.evaluate.tasks import load_task


def test_F4_every_reference_solution_passes_and_a_stub_does_not():
    task = load_task("code-small")
    for item in (*task.items, *task.examples):
        outcome = run_code(program_of(item.prompt, item.reference, item.tests))
        assert outcome.passed, (item.prompt, outcome.why)
    for item in task.items[:5]:
        assert not run_code(program_of(item.prompt, "    pass\n", item.tests)).passed


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", "exited early with code 0"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "PermissionError"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:9')", "URLError: <urlopen error socket."),
        ("import os; os.system('true')", "PermissionError: os.system is out of reach"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError: os.fork is out of reach"),
        ("open('x', 'w')", "PermissionError: files are out of reach"),
        ("print(open('/etc/passwd').read())", "PermissionError: files are out of reach"),
        ("import os; os.listdir('/')", "PermissionError: files are out of reach"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError: os.kill is out of reach"),
        ("import ctypes; ctypes.CDLL(None)", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "PermissionError"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("while True: pass", "took more than 1 seconds of CPU"),
    ],
)
def test_what_goes_wrong_says_why(program, why):
    outcome = run_code(program, seconds=1)
    assert not outcome.passed
    assert outcome.why.startswith(why), outcome.why


def test_the_library_may_be_used_and_output_goes_nowhere():
    program = "import json, collections, itertools, datetime\nprint('x' * 10**7)\nassert json.loads('[1]') == [1]"
    assert run_code(program).passed
    assert run_code("import sys; sys.stderr.write('noise'); sys.stdout.write('noise')").passed


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert run_code("import os; assert 'SECRET_TOKEN' not in os.environ").passed


def test_a_sleeper_is_ended_by_the_clock():
    outcome = run_code("import time; time.sleep(60)", seconds=1)
    assert outcome.why == "took longer than 3 seconds"


def test_the_code_in_an_answer():
    assert program_of("def f():\n", "    return 1\n", "f()") == "def f():\n    return 1\n\n\nf()\n"
    assert program_of("q", "Here:\n```python\ndef f(): pass\n```\nIt does nothing.", "f()").startswith("def f(): pass")
    assert program_of("q", "def f(): pass\n", "f()").startswith("def f")
    for answer in (
        "Here:\n```python3\ndef f():\n    return 1\n```\n",
        "```py\r\ndef f():\r\n    return 1\r\n```\r\n",
        "1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n",
        "```python title=f.py\ndef f():\n    return 1\n",
    ):
        assert run_code(program_of("q", answer, "assert f() == 1")).passed, answer
