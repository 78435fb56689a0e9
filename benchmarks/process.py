"""Runs measurements, each in a process of its own, and caches their results so that an interrupted run resumes.

Several processes can take turns: all are started and wait, and one at a time computes for a window. Other load on the
machine then affects all contenders alike; if one process ran after another, minutes would separate them.
"""

import functools
import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import ingot
from benchmarks.contenders import Contender, cache_directory
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError

Result = dict[str, Any]
TURN = "@turn"
"""The line that a process prints when it waits for its turn (`peers/common.py`)."""
PATH_FIELDS = ("ids", "store", "weights", "directory", "corpus")
"""Fields of a job that are paths of temporary files, which do not affect the work."""


class ResultCache:
    """Results of finished measurements, by contender, job and a digest of the code.

    Args:
        directory: where results are stored; None disables the cache.
    """

    def __init__(self, directory: Path | None):
        self.directory = directory

    @classmethod
    def resumable(cls) -> "ResultCache":
        return cls(cache_directory() / "bench")

    def path(self, contender: Contender, job: Mapping[str, Any], repetition: int) -> Path | None:
        """The file of this measurement's result; None if the cache is disabled."""
        if self.directory is None:
            return None
        work = {name: value for name, value in job.items() if name not in PATH_FIELDS}
        key = [contender.name, contender.command, work, repetition, code_digest()]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.directory / f"{name}.json"

    def clear(self) -> None:
        """Delete all results, after a run is complete."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def measure(contender: Contender, job: Mapping[str, Any], cache: ResultCache, repetition: int = 0) -> Result:
    """Run a contender's job in a process and return its result, or the cached one.

    Raises:
        UserError: the process failed; the message has the last line of its errors.
    """
    (result,) = measure_in_turns([contender], job, cache, repetition)
    if isinstance(result, UserError):
        raise result
    return result


def measure_in_turns(
    contenders: Sequence[Contender], job: Mapping[str, Any], cache: ResultCache, repetition: int = 0
) -> list[Result | UserError]:
    """Measure several contenders in turns; a process that fails has an error in place of its result.

    Each process is ready before the next one starts. Consecutive turns go through the processes in opposite orders.
    """
    jobs = [{**job, **contender.changes} for contender in contenders]
    paths = [cache.path(contender, job, repetition) for contender, job in zip(contenders, jobs, strict=True)]
    if all(path is not None and path.exists() for path in paths):
        return [json.loads(path.read_text()) for path in paths if path is not None]
    with ExitStack() as stack:
        processes: list[_Process] = []
        for contender, contender_job in zip(contenders, jobs, strict=True):
            errors = stack.enter_context(TemporaryFile("w+"))
            processes.append(stack.enter_context(_Process(contender, contender_job, errors)))
            processes[-1].read_until_waiting()
        waiting = processes
        while waiting := [process for process in waiting[::-1] if process.waiting]:
            for process in waiting:
                process.resume()
        results = [process.result() for process in processes]
    for path, result in zip(paths, results, strict=True):
        if path is not None and not isinstance(result, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_json(path, result)
    return results


class _Process:
    """The process of a contender. Leaving the context kills it, also after an interruption by the user."""

    def __init__(self, contender: Contender, job: Mapping[str, Any], errors: IO[str]):
        self._name, self._errors, self._last_line, self.waiting = contender.name, errors, "", False
        self._process = subprocess.Popen(
            contender.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if job.get("profile") else errors,
            text=True,
            env=dict(contender.environment) or None,
        )
        self._send(json.dumps(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # closing flushes lines that the process did not read
                if pipe is not None:
                    pipe.close()

    def read_until_waiting(self) -> None:
        """Read its output until it waits for its turn or ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.waiting = line.strip() == TURN
            if self.waiting:
                return
            self._last_line = line.strip() or self._last_line
        self.waiting = False
        self._process.wait()

    def resume(self) -> None:
        """Give it a turn: let it compute until it waits again or ends."""
        self._send("")
        self.read_until_waiting()

    def result(self) -> Result | UserError:
        """The last line of its output as JSON, or the error with which it ended."""
        if self._process.returncode == 0 and self._last_line:
            return json.loads(self._last_line)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        why = lines[-1] if lines else f"exit code {self._process.returncode}, nothing printed"
        return UserError(f"{self._name}: its process ended without a result: {why}")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `result` reports why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@functools.cache
def code_digest() -> str:
    """A digest of our sources and the peers' scripts, so that results of other code are not used."""
    digest = hashlib.sha256()
    for directory in (Path(ingot.__file__).parent, Path(__file__).parent):
        for file in sorted(directory.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
