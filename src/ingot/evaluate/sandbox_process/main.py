"""Starts as one of the two processes."""

import ast
import builtins
import contextlib
import io
import json
import os
import sys
import types
from typing import Any

from .confinement import confine, refuse_events
from .remote import Disconnected, Peer

MODULE = types.ModuleType("__main__")
"""The module of the program, or of the tests: this file's own names are not in it."""


def run(source: str) -> None:
    """Run source text in `MODULE`."""
    exec(compile(source, "program", "exec"), vars(MODULE))


def names() -> dict[str, Any]:
    """The program's names and their values."""
    return vars(MODULE).copy()


def serve_program(reader: Any, writer: Any) -> None:
    """Run a program and answer its tests until they end."""
    sys.stdout = io.StringIO()
    with contextlib.suppress(Disconnected):
        Peer(reader, writer, {"run": run, "names": names}).serve_forever()


def test_program(reader: Any, writer: Any, *, program: str, tests: str) -> dict[str, Any]:
    """Run a program in the other process, and its tests in this one.

    The tests get the program's names, but keep the builtins: an `abs` that always returns 0 could make them pass.

    Returns:
        passed, and the error of the program or of the first test that failed; None if the program's process has ended.
    """
    peer = Peer(reader, writer)
    try:
        peer.request("run", program)
        defined = peer.request("names")
        defined = {name: value for name, value in defined.items() if not name.startswith("__")}
        if replaced := sorted(_names_in(tests) & defined.keys() & vars(builtins).keys()):
            raise NameError(f"the program defines '{replaced[0]}', a builtin that the tests use")
        vars(MODULE).update((name, value) for name, value in defined.items() if not hasattr(builtins, name))
        run(tests)
    except Disconnected:
        return {"passed": False, "error": None}
    except BaseException as error:
        return {"passed": False, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"passed": True, "error": ""}


def _names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def main(role: str, settings: str) -> None:
    """`program`: requests on standard input, replies on standard output. `tests`: the program's source and tests on
    standard input, the verdict on standard output, and two open files to the other process."""
    options = json.loads(settings)
    standard = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    other = [os.fdopen(number, mode) for number, mode in zip(options["other"], ("rb", "wb"), strict=False)]
    null = os.open(os.devnull, os.O_RDWR)
    confine(options["seconds"], options["memory"], options["weak"])
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.set_int_max_str_digits(0)
    sys.modules["__main__"] = MODULE
    if role == "program":
        if options["weak"]:
            refuse_events()
        serve_program(*standard)
    else:
        (source, verdict), (reader, writer) = standard, other
        verdict.write(json.dumps(test_program(reader, writer, **json.loads(source.read()))).encode())
        verdict.flush()
    os._exit(0)
