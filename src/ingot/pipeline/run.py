"""Runs a recipe: each stage that is not a HIT runs in a child process, one after another.

The parent never imports torch. It prepares the child's environment, because a process reads allocator and thread
settings only when it starts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.core.allocator import ALLOCATOR_ENVIRONMENT
from ingot.core.artifact import STAGES
from ingot.core.errors import UNSUPPORTED, StageFailed, UserError, print_message
from ingot.core.process import machine_is_busy, shorten_spin
from ingot.core.ranks import own_rank
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph
from ingot.pipeline.ranks import run_ranks
from ingot.pipeline.status import Status, status
from ingot.stages.job import read_result
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS

QUIET = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
"""Environment variables of stages: no telemetry, no network, no warning about threads of tokenizers."""

_STANDARD_ERROR = 2
MAX_RECORDED_FILES = 1000
"""Most raw files whose digests a stage records one by one, to name the changed ones later."""

Report = Callable[[Node, Status, Mapping[str, Any] | None], None]
"""report(node, status, result): called before a stage with result = None, and after it with its numbers if it ran."""


def run(
    graph: Graph, only: list[str], report: Report, quiet: bool = False, nproc: int | None = None
) -> dict[str, Path]:
    """Run the named stages (all by default) and the stages that they need; finished ones are reused.

    Args:
        nproc: processes of a train stage; default: as many as its mesh names, or one.

    Returns:
        Stage name -> its directory.

    Raises:
        StageFailed: a stage's process ended with an error, which it has printed.
        UserError: the run cannot start.
    """
    require_files([graph], only)
    if own_rank().size > 1:
        _become_rank(graph, only, quiet)
    check_meshes(graph, only, nproc)
    done: dict[str, Path] = {}
    for node in graph.needed(only):
        state = status(graph, node)
        report(node, state, None)
        if state.state != "HIT":
            link(graph, node)
            _run_child(graph, node, quiet, processes(node, nproc))
            report(node, state, read_result(graph.stage(node).path))
        link(graph, node)
        done[node.name] = graph.stage(node).path
    return done


def require_files(graphs: list[Graph], only: list[str]) -> None:
    """Check that the raw files of all stages that would run can be read.

    Raises:
        UserError: some cannot be read; the message names all of them.
    """
    needed = [(graph, node) for graph in graphs for node in graph.needed(only) if node.missing]
    missing = [node.missing for graph, node in needed if status(graph, node).state == "MISSING"]
    if missing:
        raise UserError("\n".join(dict.fromkeys(filter(None, missing))))


def link(graph: Graph, node: Node) -> None:
    """Link `runs/NAME/STAGE` to the node's directory. The link is relative, so that the root can be moved."""
    path = graph.link(node)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(graph.stage(node).path.resolve(), path.parent.resolve())
    if path.is_symlink() and os.readlink(path) == target:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in UNSUPPORTED:
            raise
        raise UserError(
            f"{path}: the file system has no symbolic links, which name the stages of a run; choose another place with "
            "--out"
        ) from None


def child_environment(threads: int | None = None, short_spin: bool = False) -> dict[str, str]:
    """Environment of a stage's process. The user's variables take precedence over all but `threads`.

    Args:
        threads: number of OpenMP threads that the recipe sets.
        short_spin: let waiting threads sleep soon (`core/process.py: SHORT_SPIN`).
    """
    environment = {**ALLOCATOR_ENVIRONMENT, **QUIET, **os.environ}
    if short_spin:
        shorten_spin(environment)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def start_child(job: dict[str, Any], rank: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a job (see `job_of`).

    Args:
        rank: environment variables of a rank (`ranks.rank_environment`).
    """
    threads = job["settings"].get("loop", {}).get("threads")
    child = subprocess.Popen(
        [sys.executable, "-m", "ingot.stages"],
        stdin=subprocess.PIPE,
        stdout=_messages(),
        stderr=_messages(),
        env={
            **child_environment(threads, short_spin=job["short_spin"] or machine_is_busy()),
            **(rank or {}),
        },
    )
    assert child.stdin
    with contextlib.suppress(BrokenPipeError):  # the exit code tells that the child has ended already
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
    return child


def _messages() -> int:
    """The descriptor that a stage prints to: standard error, also where Python's own is a notebook's or is closed."""
    try:
        return sys.stderr.fileno() if sys.stderr else subprocess.DEVNULL
    except OSError:  # a stream without a descriptor
        return _STANDARD_ERROR


def processes(node: Node, nproc: int | None) -> int:
    """Processes of a stage: as many as the user asks for, else as its mesh names, or one."""
    mesh = getattr(node.settings, "mesh", None)
    return 1 if mesh is None else nproc or mesh.processes or 1


def check_meshes(graph: Graph, only: list[str], nproc: int | None) -> None:
    """Check that the meshes of all stages fit their processes.

    Raises:
        UserError: one does not.
    """
    for node in graph.needed(only):
        if mesh := getattr(node.settings, "mesh", None):
            try:
                mesh.shards(processes(node, nproc))
            except UserError as error:
                raise UserError(f"{node.name}: {error}") from None


def _become_rank(graph: Graph, only: list[str], quiet: bool) -> None:
    """Become a rank of the only train stage that is to run: torchrun has started this process as one of several.

    Raises:
        UserError: other stages are to run first, or more than one.
    """
    waiting = [node for node in graph.needed(only) if status(graph, node).state != "HIT"]
    if not waiting:
        return
    node = waiting[-1]
    if len(waiting) > 1 or not hasattr(node.settings, "mesh"):
        names = ", ".join(n.name for n in waiting)
        raise UserError(
            f"found WORLD_SIZE = {own_rank().size:,} (torchrun) with the stages {names} to run, expected one train "
            "stage whose inputs are finished; run the others first with `ingot run --only` on one process"
        )
    link(graph, node)
    job = {**job_of(graph, node, quiet), "parent": os.getppid()}
    with tempfile.TemporaryFile() as file:  # the job comes on standard input, as from `start_child`
        file.write(json.dumps(job).encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    threads = job["settings"]["loop"]["threads"]
    os.execve(sys.executable, [sys.executable, "-m", "ingot.stages"], child_environment(threads))


def _run_child(graph: Graph, node: Node, quiet: bool, size: int = 1) -> None:
    job = job_of(graph, node, quiet)
    if size > 1:
        loop = job["settings"]["loop"]
        code = run_ranks(
            partial(start_child, job),
            size,
            graph.stage(node).path,
            restarts=loop["restarts"],
            hang_seconds=60 * loop["hang_minutes"],
            notify=lambda text: print_message(f"{node.name}: {text}"),
        )
        if code:
            raise StageFailed(code)
        return
    child = start_child(job)
    try:
        code = child.wait()
    except (KeyboardInterrupt, SystemExit):
        _wait_for_end(child, node.name)
        raise
    if code == -signal.SIGINT:
        code = 130
    if code < 0:
        name = signal.Signals(-code).name
        advice = "the same command resumes it"
        if name == "SIGKILL":
            advice += "; if memory ran out (`ingot plan` shows the need), a smaller loop.micro_batch or model helps"
        print_message(f"{node.name}: ended by {name}; {advice}")
    if code:
        raise StageFailed(code if code in (2, 130) else 1)


def _wait_for_end(child: subprocess.Popen[bytes], name: str) -> None:
    """Wait until an interrupted child has saved and ended.

    A terminal sends SIGINT to parent and child. Where only the parent received a signal, the child gets SIGTERM; a
    second SIGINT would end it before it has saved.
    """
    try:
        child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        print_message(f"{name}: saving before it ends; Ctrl-C again ends it at once")
        child.wait()


def job_of(graph: Graph, node: Node, quiet: bool) -> dict[str, Any]:
    """The job that a stage's process reads (`stages/child.py`), as JSON data."""
    recipe, settings = graph.recipe, settings_tree(node.settings)
    return {
        "name": node.name,
        "kind": node.kind,
        "key": node.key,
        "version": KINDS[node.kind].version,
        "seed": node.seed,
        "raw": node.raw,
        "files": dict(node.files) if len(node.files) <= MAX_RECORDED_FILES else {},
        "settings": settings,
        "canonical": node.canonical,
        "link": f"{recipe.home}/{node.name}",
        "sinks": recipe.run.sinks,
        "short_spin": KINDS[node.kind].short_spin(node.settings),
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
