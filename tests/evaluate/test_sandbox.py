"""Code that a model wrote: right code passes, wrong code fails, and neither reaches anything."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ingot.core.errors import UserError
from ingot.evaluate import sandbox
from ingot.evaluate.abilities import run_task
from ingot.evaluate.sandbox import bwrap_problem, program_of, run_code
from ingot.evaluate.tasks import load_task
from tests.evaluate.sandbox_programs import HONEST
from tests.evaluate.sandbox_tricks import FORGERIES, HARMLESS, OTHER_FORGERIES, REACHES, WEAK

needs_bwrap = pytest.mark.skipif(bwrap_problem() is not None, reason=f"{bwrap_problem()}")
MODES = [pytest.param("bwrap", marks=needs_bwrap), "weak"]
ANY_MODE = "weak" if bwrap_problem() else "bwrap"


# -- honest programs ---------------------------------------------------------------------------------------------------


def test_F4_every_reference_solution_passes_and_a_stub_does_not():
    task = load_task("code-small")
    for item in (*task.items, *task.examples):
        outcome = run_code(program_of(item.prompt, item.reference), item.tests, ANY_MODE)
        assert outcome.passed, (item.prompt, outcome.why)
    for item in task.items[:5]:
        assert not run_code(program_of(item.prompt, "    pass\n"), item.tests, ANY_MODE).passed


NOT_IN_WEAK = ("threads and coroutines", "temporary files")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass_their_tests(name, mode):
    if mode == "weak" and name in NOT_IN_WEAK:
        pytest.skip("weak mode refuses files and the modules that coroutines need")
    outcome = run_code(*HONEST[name], mode)
    assert outcome.passed, outcome.why


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", "exited early with code 0"),
        ("raise SystemExit(0)", "SystemExit"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("class Odd(Exception): pass\nraise Odd('why')", "Odd: why"),
        ("import os; os.system('x') and missing", "NameError|PermissionError: os.system is out of reach"),
        ("print(open('/etc/passwd').read())", "FileNotFoundError|PermissionError: files are out of reach"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("def f(x): return f(x)\nf(1)", "RecursionError"),
        ("while True: pass", "took more than 1 seconds of CPU|took longer than 3 seconds"),
    ],
)
def test_what_goes_wrong_says_why(program, why, mode):
    outcome = run_code(program, "", mode, seconds=1)
    assert not outcome.passed
    assert outcome.why.startswith(tuple(why.split("|"))), outcome.why


@pytest.mark.parametrize("mode", MODES)
def test_a_large_output_is_cut(mode):
    assert run_code("def f(): print('x' * 10**7); return 1", "assert f() == 1", mode).passed
    assert run_code("import sys; sys.stderr.write('noise'); sys.stdout.write('noise')", "", mode).passed


def test_a_loop_in_the_tests_ends_too():
    assert run_code("", "while True: pass", ANY_MODE, seconds=1).why.startswith("took ")


def test_a_sleeper_is_ended_by_the_clock():
    outcome = run_code("import time; time.sleep(60)", "", ANY_MODE, seconds=1)
    assert outcome.why == "took longer than 3 seconds"


# -- dishonest programs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Fills in what a program might reach: a directory with a secret, three servers and this process."""
    host = tmp_path_factory.mktemp("host")
    (host / "secret").write_text("secret")
    families = (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, f"{host}/socket"),
        (socket.AF_UNIX, f"\0ingot-{os.getpid()}"),
    )
    servers = [socket.socket(family) for family, _ in families]
    for server, (_, address) in zip(servers, families, strict=True):
        server.bind(address)
        server.listen(50)
    names = {"HOST": str(host), "PORT": str(servers[0].getsockname()[1]), "PID": str(os.getpid())}

    def fill(program):
        for name, value in names.items():
            program = program.replace(name, value)
        return program

    os.environ["SECRET"] = "secret"
    yield fill
    del os.environ["SECRET"]
    for server in servers:
        server.close()
    assert not (host / "new").exists()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_cannot_be_forged(name, mode):
    assert not run_code(FORGERIES[name], "assert f(3) == 6", mode).passed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("program", "tests"), OTHER_FORGERIES)
def test_objects_do_not_pass_for_data(program, tests, mode):
    assert not run_code(program, tests, mode).passed


@needs_bwrap
@pytest.mark.parametrize("name", REACHES)
def test_bwrap_lets_nothing_out(name, machine):
    assert not run_code(machine(REACHES[name]), "assert f()").passed


@pytest.mark.parametrize("name", WEAK)
def test_weak_mode_holds_the_common_ways_out(name, machine):
    assert not run_code(machine(REACHES[name]), "assert f()", "weak").passed


@pytest.mark.parametrize("name", HARMLESS)
def test_without_a_sandbox_the_ways_lead_out(name, machine):
    subprocess.run([sys.executable, "-c", machine(REACHES[name]) + "\nassert f()"], check=True)


def test_a_task_runs_code_in_the_sandbox_that_it_is_given(tmp_path):
    items = [{"prompt": f"def {name}(x):\n", "tests": f"assert {name}(3) == 6"} for name in "fgh"]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, [{"task": "mine", "kind": "code"}, *items])))
    answers = ["    return 2 * x\n", "    return x\n", "    import ctypes\n    return 6\n"]
    subject = SimpleNamespace(
        generate=lambda *_: answers, nats=lambda *_: [], model=SimpleNamespace(config=SimpleNamespace(context=8))
    )
    results = run_task(subject, load_task(str(tmp_path / "mine.jsonl")), sandbox="weak")
    assert [result.right for result in results] == [True, False, False]
    assert [result.why for result in results] == ["", "AssertionError: ", "ImportError: ctypes is out of reach"]


# -- machines without bwrap --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "needs the program bwrap, which is not installed"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
        ("echo 'bwrap: Unknown option --size' >&2; exit 1", "Unknown option --size"),
        ("exit 3", "exit code 3"),
    ],
)
def test_code_is_refused_where_bwrap_does_not_work(script, reason, tmp_path, monkeypatch):
    if script:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(tmp_path / name) if script else None)
    bwrap_problem.cache_clear()
    try:
        with pytest.raises(UserError, match=reason) as error:
            run_code("x = 1")
        assert 'set sandbox = "weak"' in str(error.value)
        assert run_code("x = 1", "assert x == 1", "weak").passed
    finally:
        bwrap_problem.cache_clear()


# -- the code of an answer ---------------------------------------------------------------------------------------------


def test_the_code_in_an_answer():
    assert program_of("def f():\n", "    return 1\n") == "def f():\n    return 1\n"
    assert program_of("q", "Here:\n```python\ndef f(): pass\n```\nIt does nothing.") == "def f(): pass\n"
    assert program_of("q", "def f(): pass\n") == "def f(): pass\n"
    for answer in (
        "Here:\n```python3\ndef f():\n    return 1\n```\n",
        "```py\r\ndef f():\r\n    return 1\r\n```\r\n",
        "1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n",
        "```python title=f.py\ndef f():\n    return 1\n",
    ):
        assert run_code(program_of("q", answer), "assert f() == 1", ANY_MODE).passed, answer
