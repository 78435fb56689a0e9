"""Content-addressed stage directories: keys, atomic files, locks, and the DONE file that publishes a result.

A stage's directory is named by a hash of what determines its result, exists under that name from the start, and is
locked by its one writer. Every file in it appears whole or not at all (temporary name, fsync, rename); `metrics.jsonl`
is the one file that grows. `DONE` is written last and holds the digest of every output: without it there is no result.

Rejected: an empty marker file per task (a changed setting then silently reuses old results), and timestamps (a copied
or restored directory then looks new).
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ingot.core.errors import UserError

STAGES = "stages"
"""Where an output root has its stage directories."""
RECORD = "inputs.json"
"""What a stage was told: name, kind, key, settings, inputs."""
RESULT = "result.json"
"""Its numbers, when it has finished."""
CHECKPOINTS, STATE = "checkpoints", "state.json"
"""Where a train stage has its checkpoints, and the plain numbers of each."""
DONE, LOCK, MANIFEST = "DONE", "LOCK", "manifest.json"
_CHUNK = 1 << 20


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


def read_json(path: Path) -> Any:
    """Plain data of a file that a stage has written.

    Raises:
        UserError: it was damaged since.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged(path) from None


def read_lines(path: Path, most: int | None = None) -> list[Any]:
    """Plain data of a file of lines that a stage has written, at most the first `most`.

    Raises:
        UserError: it was damaged since.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in itertools.islice(file, most)]
    except ValueError:
        raise damaged(path) from None


def damaged(path: Path, what: str = "JSON") -> UserError:
    """The sentence for a file of a stage that cannot be read any more."""
    return UserError(
        f"{path}: not readable, expected the {what} that the stage wrote; delete that stage's directory and run the "
        "recipe again"
    )


def cache() -> Path:
    """Where is kept what can be had again: INGOT_CACHE, else `ingot` in XDG_CACHE_HOME, else ~/.cache/ingot."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("INGOT_CACHE") or f"{base}/ingot").expanduser()


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` only when the block ends well; nothing is left behind otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # of which the first one tells
            temporary.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a whole file atomically."""
    with atomic_open(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def atomic_json(path: Path, value: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def atomic_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write tables as JSON, one a line, atomically."""
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A directory that appears under `path` only when the block ends well; an older one of that name is replaced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _patient_flock(file: IO[str]) -> None:
    """Take the lock within half a second: whoever only asks whether it is held holds it for an instant."""
    for _ in range(10):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_manifest(directory: Path) -> None:
    """List every file of a directory with its size and digest."""
    files = sorted(f for f in directory.iterdir() if f.is_file())
    atomic_json(directory / MANIFEST, {f.name: _record(f) for f in files})


def manifest_problem(directory: Path) -> str | None:
    """What differs from the directory's manifest, as a sentence, or None."""
    try:
        return next(_problems(directory, json.loads((directory / MANIFEST).read_text())), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or damaged itself
        return f"{directory}: no readable {MANIFEST}"


def _record(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "blake2b": digest_file(file)}


def _problems(directory: Path, recorded: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in recorded.items():
        file = directory / name
        if not file.exists():
            yield f"{file}: missing"
        elif (size := file.stat().st_size) != expected["bytes"]:
            yield f"{file}: {size:,} bytes, expected {expected['bytes']:,}"
        elif digest_file(file) != expected["blake2b"]:
            yield f"{file}: content differs from its digest"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the checkpoints under `root`, newest first."""
    return sorted((int(p.name) for p in root.glob("[0-9]*") if p.name.isdigit()), reverse=True)


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return root / f"{step:08d}"


class StageDir:
    """One stage's directory: lock, outputs, DONE."""

    def __init__(self, path: Path):
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def is_done(self) -> bool:
        return (self.path / DONE).exists()

    def exists(self) -> bool:
        return (self.path / RECORD).exists()

    def done(self) -> dict[str, Any]:
        return read_json(self.path / DONE)

    def is_locked(self) -> bool:
        """Whether another process is writing here now."""
        try:
            with self._open_lock("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory; the kernel lets go when the process ends, however it ends.

        Raises:
            UserError: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._open_lock("a+") as file:
            try:
                _patient_flock(file)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise UserError(
                    f"{self.path}: locked by process {owner}, which is running this stage now; wait for it or stop it"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._sweep()
            yield

    def finish(self, extra: Mapping[str, Any] | None = None) -> None:
        """Publish: digest every output and write DONE."""
        outputs = {str(file.relative_to(self.path)): _record(file) for file in self.outputs()}
        atomic_json(self.path / DONE, {**(extra or {}), "outputs": outputs})

    def outputs(self) -> list[Path]:
        """Every file of the stage but the lock, DONE and leftovers of interrupted writes."""
        files = (f for f in sorted(self.path.rglob("*")) if f.is_file() and not f.is_symlink())
        return [f for f in files if f.name not in (DONE, LOCK) and not f.name.endswith(".tmp")]

    def verify(self) -> list[str]:
        """Sentences about outputs that are missing or differ from their digest; empty when all is well."""
        try:
            return list(_problems(self.path, self.done()["outputs"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{self.path / DONE}: not readable"]

    def _open_lock(self, mode: str) -> IO[str]:
        return (self.path / LOCK).open(mode)

    def _sweep(self) -> None:
        """Remove what an interrupted write of an earlier process left."""
        for leftover in self.path.rglob(".*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


class FileHashes:
    """Content digests of source files, remembered by (path, size, mtime, inode): unchanged files are not reread."""

    def __init__(self, memo: Path):
        self._memo = memo
        self._known: dict[str, list[Any]] = {}
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):  # what is damaged is made anew
            found = json.loads(memo.read_text()).items()
            self._known = {name: told for name, told in found if isinstance(told, list) and len(told) == 4}
        self._changed = False

    def digest(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(str(path))
        if known is None or known[:3] != stamp:
            known = self._known[str(path)] = [*stamp, digest_file(path)]
            self._changed = True
        return known[3]

    def save(self) -> None:
        if self._changed:
            with contextlib.suppress(OSError):  # where nothing can be written they are read again next time
                atomic_write(self._memo, json.dumps(self._known))
            self._changed = False
