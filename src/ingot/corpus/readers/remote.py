"""Files of other machines: `https://`, and through fsspec `hf://datasets/...` and `s3://...` (extra `remote`).

Every file has a recorded SHA-256, so a recipe gives the same corpus on every machine, and a file that changes is
noticed: `sha256` of a single file, or `checksums`, a file with a line for each as `sha256sum` writes them. The first
run writes it, from what it finds; later runs read the files that it lists, and need no network for those in the cache.
"""

import contextlib
import fnmatch
import glob
import hashlib
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.artifact import atomic_open, atomic_write, cache_directory
from ingot.core.errors import MissingFile, UserError, notify
from ingot.corpus.readers.suffixes import is_readable
from ingot.corpus.settings import Source

SCHEMES = {"hf": "huggingface_hub", "s3": "s3fs"}
"""Scheme that fsspec opens -> the package with its implementation."""
_INSTEAD = "put the files on this machine and name them with --set 'stage.NAME.sources=[\"FILE\"]'"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_BLOCK = 1 << 20


class RemoteFile(NamedTuple):
    """A file, its address and its digest."""

    url: str
    sha256: str

    @property
    def cached(self) -> Path:
        """Where its content is kept."""
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.url).path.rpartition("/")[2])
        return cache_directory() / self.sha256 / (name or "download")

    def group(self, path: str) -> str:
        """Its place below the part of a source's path that has no pattern; of a single file its name."""
        if self.url == path:
            return self.cached.name
        root = path[: match.start()].rpartition("/")[0] if (match := re.search(r"[*?\[]", path)) else path
        return self.url.removeprefix(root.rstrip("/") + "/")


def is_remote(path: str) -> bool:
    """Whether the path of a source is an address."""
    return "://" in path


def remote_files(source: Source) -> list[RemoteFile]:
    """The files of a source with their recorded digests. Downloads them if `checksums` has not been written yet.

    Raises:
        UserError: an unknown scheme, no digest, a package or file that is missing, or no access.
    """
    scheme = _scheme(source)
    if source.sha256 is not None:
        return [RemoteFile(source.path, source.sha256)]
    if scheme == "https" or source.checksums is None:
        several = ' or checksums = "sums.txt" of several, which the first run writes' if scheme != "https" else ""
        raise UserError(
            f"sources: '{source.path}' has no sha256, which a remote file needs so that results are reproducible; "
            f'write {{ path = "{scheme}://...", sha256 = "..." }}{several}'
        )
    record = Path(source.checksums)
    if not record.exists():
        _record(source, record)
    return _read_record(source, record)


def fetch(source: Source, remote: RemoteFile) -> Path:
    """The cached content of a file, downloaded if it is not there or damaged.

    Raises:
        UserError: it cannot be downloaded, or has changed since its digest was recorded.
    """
    file = remote.cached
    if not (file.exists() and sha256_of(file) == remote.sha256):
        digest = _download(source, remote.url, file, remote.sha256)
        assert digest == remote.sha256
    return file


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scheme(source: Source) -> str:
    try:
        url = urllib.parse.urlsplit(source.path)
    except ValueError as error:
        raise UserError(f"sources: '{source.path}' is no address ({error}); correct it") from None
    if url.scheme not in ("https", *SCHEMES):
        raise UserError(
            f"sources: '{source.path}' has scheme {url.scheme}://, expected https://, hf://datasets/ or s3:// (or a "
            "local file); change it"
        )
    if url.scheme == "hf" and url.netloc != "datasets":
        raise UserError(f"sources: '{source.path}' is no data set, expected hf://datasets/ORG/NAME/FILE; change it")
    return url.scheme


def _record(source: Source, record: Path) -> None:
    """Write `checksums`: download what the path matches, and list it."""
    files = _listed(source)
    notify(f"sources: recording the SHA-256 of {len(files):,} files of {source.path} in {record}; keep it")
    found = []
    for number, url in enumerate(files):
        part = cache_directory() / f"recording-{os.getpid()}-{number}"
        try:
            entry = RemoteFile(url, _download(source, url, part, None))
            entry.cached.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, entry.cached)
        finally:
            part.unlink(missing_ok=True)
        found.append(entry)
    atomic_write(record, "".join(f"{entry.sha256}  {entry.url}\n" for entry in found))


def _read_record(source: Source, record: Path) -> list[RemoteFile]:
    files: list[RemoteFile] = []
    for number, line in enumerate(record.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None or not _belongs(match[2], source.path):
            raise UserError(
                f"{record}, line {number}: found {line[:80]!r}, expected a SHA-256 and a file of {source.path}; delete "
                "the file to record them again"
            )
        files.append(RemoteFile(match[2], match[1]))
    if not files:
        raise UserError(f"{record}: found no file, expected those of {source.path}; delete it to record them again")
    return files


def _belongs(url: str, path: str) -> bool:
    """Whether an address is the path, below it, or matched by it, so that a record of another pattern is noticed."""
    return url == path or url.startswith(path.rstrip("/") + "/") or _matches(url.split("/"), path.split("/"))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns or not parts:
        return not parts and not any(pattern != "**" for pattern in patterns)
    if patterns[0] == "**":  # any number of directories
        return any(_matches(parts[n:], patterns[1:]) for n in range(len(parts) + 1))
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _listed(source: Source) -> list[str]:
    """The addresses of the files that a path matches, sorted; of a directory those with a suffix of text or rows."""
    scheme, path = source.path.split("://", 1)
    with _errors_of(source.path):
        fs = _file_system(source.path)
        if glob.has_magic(path):
            matches = [name for name in fs.glob(path) if not fs.isdir(name)]
        elif fs.isdir(path):
            below = fs.find(path)
            matches = [name for name in below if is_readable(name)]
            if skipped := len(below) - len(matches):
                notify(f"sources: {source.path}: not read: {skipped:,} files without a suffix of text or rows")
        else:
            matches = [path] if fs.exists(path) else []
    if not matches:
        raise MissingFile(f"sources: '{source.path}' matches no file, expected at least one; check the path")
    return [f"{scheme}://{name.lstrip('/')}" for name in sorted(matches)]


def _download(source: Source, url: str, file: Path, expected: str | None) -> str:
    """Write a file atomically. Returns its SHA-256, which must be the expected one, if there is one."""
    state = hashlib.sha256()
    with atomic_open(file) as out:
        for block in _blocks(url):
            state.update(block)
            out.write(block)
        if expected is not None and state.hexdigest() != expected:
            where = f" in {source.checksums}" if source.sha256 is None else ""
            raise UserError(
                f"sources: '{url}' was downloaded with sha256 {state.hexdigest()}, expected {expected}{where}: the "
                f"remote file has changed; correct the recipe, or {_INSTEAD}"
            )
    return state.hexdigest()


def _blocks(url: str) -> Iterator[bytes]:
    """The content of an address."""
    with _errors_of(url):
        is_https = url.startswith("https://")
        response = urllib.request.urlopen(url, timeout=30) if is_https else _file_system(url).open(url, "rb")
    with response:
        while True:
            with _errors_of(url):
                block = response.read(_BLOCK)
            if not block:
                return
            yield block


def _file_system(url: str) -> Any:
    scheme = url.partition("://")[0]
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the package is imported
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except (ImportError, ValueError):
        raise UserError(
            f"sources: '{url}' needs fsspec and {SCHEMES[scheme]}; pip install 'ingot[remote]', or {_INSTEAD}"
        ) from None


@contextlib.contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """What goes wrong on the way to an address, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except PermissionError as error:
        how = "`hf auth login` or HF_TOKEN" if url.startswith("hf:") else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise UserError(f"sources: '{url}' is not open to this user ({error}); set {how}") from None
    except FileNotFoundError:
        raise MissingFile(f"sources: '{url}' does not exist, expected a file; check the path") from None
    except Exception as error:  # every implementation has its own
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UserError(f"sources: '{url}' could not be downloaded ({reason}); {_INSTEAD}") from None
