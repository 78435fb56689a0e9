"""Content-addressed stage directories: keys, atomic files, locks, and the DONE file that publishes a result.

A stage's directory is named by a hash of what determines its result, exists under that name from the start, and is
locked by its one writer. Every file is written atomically (temporary name, fsync, rename), except for `metrics.jsonl`,
which is appended to. `DONE` is written last and holds the digest of every output: without it there is no result.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ingot.core.errors import UNSUPPORTED, UserError, name_file, notify

STAGES = "stages"
"""Directory of all stage directories, below the output root."""
RECORD = "inputs.json"
"""File of a stage: its name, kind, key, settings and inputs."""
RESULT = "result.json"
"""File of a finished stage: its metrics."""
CHECKPOINTS, STATE = "checkpoints", "state.json"
"""Directory of a train stage's checkpoints, and the file with the scalar state of each."""
DONE, LOCK, MANIFEST = "DONE", "LOCK", "manifest.json"
_OLD = ".old.tmp"
"""End of the name of a directory that is just replaced."""
_CHUNK = 1 << 20
_LFS = b"version https://git-lfs.github.com/spec/"


def digest_bytes(data: bytes) -> str:
    """BLAKE2b-128 of the bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_json(value: Any) -> str:
    """Digest of plain data, independent of key order."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def digest_file(path: Path) -> str:
    """Digest of a file's content, read in blocks."""
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            state.update(block)
    return state.hexdigest()


def regular(path: Path) -> Path:
    """The path, unless something else than a file's content is there: opening a pipe would wait for ever.

    Raises:
        UserError: a pipe, a directory, a link to nothing, or the stand-in of a file that Git LFS has not fetched.
    """
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{path}: not a regular file, expected one; copy the file again, or name another")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise UserError(f"{path}: found a pointer of Git LFS, expected the file itself; run `git lfs pull`")
    return path


def read_json(path: Path) -> Any:
    """Content of a JSON file that a stage has written.

    Raises:
        UserError: the file is damaged.
    """
    regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise damaged(path) from None


def read_lines(path: Path, limit: int | None = None) -> list[Any]:
    """Values of a JSON Lines file that a stage has written; at most the first `limit`.

    Raises:
        UserError: the file is damaged.
    """
    regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in itertools.islice(file, limit)]
    except (ValueError, RecursionError):
        raise damaged(path) from None


def damaged(path: Path, what: str = "JSON") -> UserError:
    """The error for a file of a stage that cannot be read any more."""
    return UserError(
        f"{path}: not readable, expected the {what} that the stage wrote; delete that stage's directory and run the "
        "recipe again"
    )


def cache_directory() -> Path:
    """Directory of downloads and compiled code: INGOT_CACHE, else `ingot` in XDG_CACHE_HOME, else ~/.cache/ingot."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("INGOT_CACHE") or f"{base}/ingot").expanduser()


def code_directory(name: str) -> Path | None:
    """A directory of the cache for compiled code; None if other users can write to it, since their code would run."""
    path = cache_directory() / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path if is_private(path) and is_private(path.parent) else None


def is_private(path: Path) -> bool:
    """Whether only this user and root can change a file, or replace a file in a directory."""
    status = path.stat()
    mode = status.st_mode
    others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid != status.st_uid)  # a user's own group
    sticky = stat.S_ISDIR(mode) and mode & stat.S_ISVTX  # everyone can replace only their own files
    return status.st_uid in (os.geteuid(), 0) and (not others or bool(sticky))


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under `path` when the block succeeds; after an error nothing remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with name_file(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                _sync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file atomically."""
    with atomic_open(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def atomic_json(path: Path, value: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def atomic_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, atomically."""
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a directory that appears under `path` when the block succeeds; an older one of that name is replaced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with name_file(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        _sync(handle.fileno())
            old = path.with_name(f".{path.name}.{os.getpid()}{_OLD}")
            try:  # an interruption leaves the older one or this one
                if path.exists():
                    os.replace(path, old)
                os.replace(temporary, path)
            except BaseException:
                if old.exists() and not path.exists():
                    os.replace(old, path)
                raise
            shutil.rmtree(old, ignore_errors=True)
            _sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flock_with_retries(file: IO[str]) -> None:
    """Take the lock within half a second: `StageDir.is_locked` of another process holds it for an instant."""
    for _ in range(10):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_manifest(directory: Path, records: Mapping[str, Any] | None = None) -> None:
    """Write the size and the digest of every file of a directory to its manifest.

    Args:
        records: those of some files, from `file_record`.
    """
    records = records or {}
    files = sorted(f for f in directory.iterdir() if f.is_file())
    atomic_json(directory / MANIFEST, {f.name: records.get(f.name) or file_record(f) for f in files})


def manifest_problem(directory: Path) -> str | None:
    """The first difference from the directory's manifest, as a message; None where all files are named and match."""
    try:
        recorded = json.loads(regular(directory / MANIFEST).read_text())
        if unnamed := sorted({f.name for f in directory.iterdir() if f.name[0] != "."} - {MANIFEST, *recorded}):
            return f"{directory / unnamed[0]}: not named in {MANIFEST}"
        if foreign := [name for name in recorded if Path(name).name != name]:
            return f"{directory / MANIFEST}: found {foreign[0]!r}, expected names of files beside it"
        return next(file_problems(directory, recorded), None) if recorded else f"{directory}: no file but {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # it is absent or damaged
        return f"{directory}: no readable {MANIFEST}"


def file_record(file: Path) -> dict[str, Any]:
    """The size and the digest of a file, as in a manifest."""
    return {"bytes": file.stat().st_size, "blake2b": digest_file(file)}


def file_problems(directory: Path, recorded: Mapping[str, Any], digests: bool = True) -> Iterator[str]:
    """Differences of a directory's files from their records, as messages.

    Args:
        recorded: name -> `file_record`.
        digests: also read the files.
    """
    for name, expected in recorded.items():
        file = directory / name
        if not file.exists():
            yield f"{file}: missing"
        elif not file.is_file():
            yield f"{file}: not a regular file"
        elif (size := file.stat().st_size) != expected["bytes"]:
            yield f"{file}: {size:,} bytes, expected {expected['bytes']:,}"
        elif digests and digest_file(file) != expected["blake2b"]:
            yield f"{file}: content differs from its digest"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        _sync(handle)
    finally:
        os.close(handle)


def _sync(handle: int) -> None:
    """Write a file or a directory to the disk, where its file system can."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the checkpoints under `root`, newest first."""
    return sorted((int(p.name) for p in root.glob("[0-9]*") if p.name.isdigit()), reverse=True)


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return root / f"{step:08d}"


def checkpoint_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, as a message; None if it is complete and matches its manifest."""
    if problem := manifest_problem(path):
        return problem
    if not (path / STATE).exists():
        return f"{path}: no {STATE}"
    return None if any(path.glob("*.safetensors")) else f"{path}: no tensors"


class StageDir:
    """One stage's directory: its lock, its outputs and its DONE file."""

    def __init__(self, path: Path):
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def is_done(self) -> bool:
        return (self.path / DONE).exists()

    def exists(self) -> bool:
        """Whether the stage has been started."""
        return (self.path / RECORD).exists()

    def read_done(self) -> dict[str, Any]:
        """Content of DONE: key, seconds, and the size and digest of each output."""
        return read_json(self.path / DONE)

    def is_locked(self) -> bool:
        """Whether another process holds the directory's lock."""
        try:
            with self._open_lock("r") as file, name_file(self.path / LOCK):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        return False

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the directory's lock. The kernel releases it when the process ends, even when it is killed.

        Args:
            on_wait: called with the process id of another holder, before waiting until that one releases the lock.

        Raises:
            UserError: another process holds the lock, and there is no `on_wait`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._open_lock("a+") as file:
            try:
                with name_file(self.path / LOCK):
                    _flock_with_retries(file)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                if on_wait is None:
                    busy = f"locked by process {owner}, which is running this stage now; wait for it or stop it"
                    raise UserError(f"{self.path}: {busy}") from None
                on_wait(owner)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                notify(f"{self.path}: the file system has no locks; do not run this stage twice at the same time")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._remove_leftovers()
            yield

    def finish(self, extra: Mapping[str, Any] | None = None) -> None:
        """Publish the result: digest every output and write DONE, with `extra` fields."""
        outputs = {str(file.relative_to(self.path)): file_record(file) for file in self.outputs()}
        atomic_json(self.path / DONE, {**(extra or {}), "outputs": outputs})

    def outputs(self) -> list[Path]:
        """Every file of the stage except the lock, DONE and leftovers of interrupted writes."""
        files = (f for f in sorted(self.path.rglob("*")) if f.is_file() and not f.is_symlink())
        return [f for f in files if f.name not in (DONE, LOCK) and not f.name.endswith(".tmp")]

    def verify(self) -> list[str]:
        """Messages about outputs that are missing or differ from their digest; empty when all match."""
        try:
            return list(file_problems(self.path, self.read_done()["outputs"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return [f"{self.path / DONE}: not readable"]

    def _open_lock(self, mode: str) -> IO[str]:
        return (self.path / LOCK).open(mode)

    def _remove_leftovers(self) -> None:
        """Remove temporary files of interrupted writes of an earlier process."""
        for leftover in self.path.rglob(".*.tmp"):
            replaced = leftover.with_name(leftover.name[1:].rsplit(".", 3)[0])
            if leftover.name.endswith(_OLD) and not replaced.exists():
                os.replace(leftover, replaced)  # killed between the two renames of `atomic_directory`
            elif leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
