"""One measurement is one process: started, told its job, heard, and its result kept where a run may be interrupted.

Several take turns: all are started, and then one at a time computes for a while. So what else goes on, on a machine
that others use too, meets all of them alike; with one process after another minutes lie between the two of a ratio.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache as once
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import ingot
from benchmarks.contenders import Contender, cache
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError

Result = dict[str, Any]
TURN = "@turn"
"""What a process prints when it is ready to be measured (`peers/common.py`)."""
PLACES = ("ids", "store", "weights", "directory", "corpus")
"""What a job names that says nothing of the work: where its files lie."""


class Kept:
    """Results of finished measurements, by what was measured with which code; an interrupted run finds them again.

    Without a directory nothing is kept.
    """

    def __init__(self, directory: Path | None):
        self.directory = directory

    @classmethod
    def resumable(cls) -> "Kept":
        return cls(cache() / "bench")

    def path(self, contender: Contender, job: Mapping[str, Any], repetition: int) -> Path | None:
        """Where the result of this measurement is kept."""
        if self.directory is None:
            return None
        told = {name: value for name, value in job.items() if name not in PLACES}
        what = [contender.name, contender.command, told, repetition, code()]
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        return self.directory / f"{name}.json"

    def clear(self) -> None:
        """All was measured: the next run begins anew."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def measure(contender: Contender, job: Mapping[str, Any], kept: Kept, repetition: int = 0) -> Result:
    """Let a contender do its job; returns what it prints, or what it printed before an interruption.

    Raises:
        UserError: it ended with an error, of which the last line is told.
    """
    (found,) = in_turns([contender], job, kept, repetition)
    if isinstance(found, UserError):
        raise found
    return found


def in_turns(
    contenders: Sequence[Contender], job: Mapping[str, Any], kept: Kept, repetition: int = 0
) -> list[Result | UserError]:
    """The same of several, each ready before the next is started; turns go through them forwards and backwards."""
    jobs = [{**job, **contender.changes} for contender in contenders]
    paths = [kept.path(c, told, repetition) for c, told in zip(contenders, jobs, strict=True)]
    if all(path is not None and path.exists() for path in paths):
        return [json.loads(path.read_text()) for path in paths if path is not None]
    with ExitStack() as stack:
        started: list[_Process] = []
        for contender, told in zip(contenders, jobs, strict=True):
            errors = stack.enter_context(TemporaryFile("w+"))
            started.append(stack.enter_context(_Process(contender, told, errors)))
            started[-1].listen()
        turn = started
        while turn := [process for process in turn[::-1] if process.waits]:
            for process in turn:
                process.go_on()
        found = [process.result() for process in started]
    for path, result in zip(paths, found, strict=True):
        if path is not None and not isinstance(result, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_json(path, result)
    return found


class _Process:
    """A contender at its job. Leaving the context ends it, also where the user stops us."""

    def __init__(self, contender: Contender, job: Mapping[str, Any], errors: IO[str]):
        self._name, self._errors, self._last, self.waits = contender.name, errors, "", False
        self._process = subprocess.Popen(
            contender.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if job.get("profile") else errors,
            text=True,
            env=dict(contender.environment) or None,
        )
        self._tell(json.dumps(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of what it was not told any more
                if pipe is not None:
                    pipe.close()

    def listen(self) -> None:
        """Until it waits for its turn, or has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.waits = line.strip() == TURN
            if self.waits:
                return
            self._last = line.strip() or self._last
        self.waits = False
        self._process.wait()

    def go_on(self) -> None:
        """Let it compute until it waits again, or has ended."""
        self._tell("")
        self.listen()

    def result(self) -> Result | UserError:
        """What it printed last, or why it ended without."""
        if self._process.returncode == 0 and self._last:
            return json.loads(self._last)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        why = lines[-1] if lines else f"exit code {self._process.returncode}, nothing printed"
        return UserError(f"{self._name}: its process ended without a result: {why}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `result` says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@once
def code() -> str:
    """A digest of all of our sources and the peers' scripts: results of other code are not used again."""
    digest = hashlib.sha256()
    for directory in (Path(ingot.__file__).parent, Path(__file__).parent):
        for file in sorted(directory.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
