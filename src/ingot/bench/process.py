"""One measurement is one process: started, told its job, heard, and its result kept where a run may be interrupted."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache as once
from pathlib import Path
from typing import Any

import ingot
from ingot.bench.contenders import SCRIPTS, Contender, cache
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError

Result = dict[str, Any]
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
    job = {**job, **contender.changes}
    path = kept.path(contender, job, repetition)
    if path is not None and path.exists():
        return json.loads(path.read_text())
    process = subprocess.Popen(
        contender.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if job.get("profile") else subprocess.PIPE,
        text=True,
        env=dict(contender.environment) or None,
    )
    try:
        out, errors = process.communicate(json.dumps(job))
    finally:  # also where the user stops us
        process.kill()
        process.wait()
    lines = out.splitlines()
    if process.returncode or not lines:
        why = (errors or "").strip().splitlines()[-1:] or [f"exit code {process.returncode}, nothing printed"]
        raise UserError(f"{contender.name}: its process ended without a result: {why[0]}")
    result: Result = json.loads(lines[-1])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_json(path, result)
    return result


@once
def code() -> str:
    """A digest of all of our sources, the peers' scripts among them: results of other code are not used again."""
    digest = hashlib.sha256()
    for file in sorted(Path(ingot.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    assert SCRIPTS.is_dir()
    return digest.hexdigest()[:12]
