"""Running a recipe: each stage that is not a HIT gets a child process of its own, one after the other.

The parent never imports torch. It prepares the child's environment before the child starts, because allocator and
thread settings are read once at start-up.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.core.allocator import ALLOCATOR
from ingot.core.artifact import STAGES
from ingot.core.errors import StageFailed, UserError
from ingot.core.process import busy, sleep_early
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import Status, status
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS

QUIET = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}


Report = Callable[[Node, Status, float | None], None]
"""Called before a stage (seconds None) and, where it ran, after it."""


def run(graph: Graph, only: list[str], report: Report, quiet: bool = False) -> dict[str, Path]:
    """Bring the named stages (all by default) and what they need up to date.

    Returns: stage name -> its directory.

    Raises:
        StageFailed: a stage's process ended with an error, which it has printed.
        UserError: the run cannot start.
    """
    _refuse_torchrun()
    require_files([graph], only)
    done: dict[str, Path] = {}
    for node in graph.needed(only):
        now = status(graph, node)
        report(node, now, None)
        if now.state != "HIT":
            link(graph, node)
            _run_child(graph, node, quiet)
            report(node, now, graph.stage(node).done()["seconds"])
        link(graph, node)
        done[node.name] = graph.stage(node).path
    return done


def require_files(graphs: list[Graph], only: list[str]) -> None:
    """That the files of all stages that are to be made can be read.

    Raises:
        UserError: some cannot; all are named.
    """
    needed = [(graph, node) for graph in graphs for node in graph.needed(only) if node.missing]
    missing = [node.missing for graph, node in needed if status(graph, node).state == "MISSING"]
    if missing:
        raise UserError("\n".join(dict.fromkeys(filter(None, missing))))


def link(graph: Graph, node: Node) -> None:
    """Point `runs/NAME/STAGE` at the node's directory; the link is relative, so the root can be moved."""
    path = graph.link(node)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(graph.stage(node).path.resolve(), path.parent.resolve())
    if path.is_symlink() and os.readlink(path) == target:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink()
        raise


def child_environment(threads: int | None = None, patient: bool = False) -> dict[str, str]:
    """What a process that computes is started with; what the user has set wins, but for `threads` of a recipe."""
    environment = {**ALLOCATOR, **QUIET, **os.environ}
    if patient:
        sleep_early(environment)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def start_child(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The process that does a job."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ingot.stages.child"],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        env=child_environment(job["settings"].get("loop", {}).get("threads"), patient=job["patient"] or busy()),
    )
    assert child.stdin
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is told by its exit code
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
    return child


def _run_child(graph: Graph, node: Node, quiet: bool) -> None:
    child = start_child(job_of(graph, node, quiet))
    try:
        code = child.wait()
    except (KeyboardInterrupt, SystemExit):
        _end(child, node.name)
        raise
    if code == -signal.SIGINT:
        code = 130
    if code < 0:
        name = signal.Signals(-code).name
        way = "the same command goes on"
        if name == "SIGKILL":
            way += "; if memory ran out (`ingot plan` says what is needed), a smaller loop.micro_batch or model helps"
        print(f"{node.name}: ended by {name}; {way}", file=sys.stderr)
    if code:
        raise StageFailed(code if code in (2, 130) else 1)


def _end(child: subprocess.Popen[bytes], name: str) -> None:
    """Wait for a child that was interrupted with us; one that was not, because the signal was ours alone, is told.

    By SIGTERM: a second SIGINT would not let it save.
    """
    try:
        child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # the terminal may be what has ended
            print(f"{name}: ending what is under way; Ctrl-C again ends it at once", file=sys.stderr)
        child.wait()


def job_of(graph: Graph, node: Node, quiet: bool) -> dict[str, Any]:
    """What the process of a stage is told."""
    recipe, settings = graph.recipe, settings_tree(node.settings)
    return {
        "name": node.name,
        "kind": node.kind,
        "key": node.key,
        "version": KINDS[node.kind].version,
        "seed": node.seed,
        "raw": node.raw,
        "settings": settings,
        "canonical": node.canonical,
        "place": f"{recipe.home}/{node.name}",
        "sinks": recipe.run.sinks,
        "patient": KINDS[node.kind].sleeps_between_loops(node.settings),
        "recipe": {
            "run": settings_tree(recipe.run),
            "stage": {node.name: {"kind": node.kind, **settings}},
        },
        "inputs": {
            role: {"name": n.name, "key": n.key, "dir": f"{STAGES}/{n.directory}"} for role, n in node.inputs.items()
        },
        "root": str(graph.root.absolute()),
        "dir": str(graph.stage(node).path.absolute()),
        "parent": os.getpid(),
        "quiet": quiet,
    }


def _refuse_torchrun() -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("found WORLD_SIZE > 1 (torchrun), expected one process; call `ingot run` without torchrun")
