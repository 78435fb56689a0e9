"""Resolves the sources of a recipe to files, and computes one digest of all their content.

Directories are walked in sorted order, so the same files give the same corpus on every file system. Files of other
machines are in `remote.py`; their digests are known from the recipe without a download.
"""

import glob
from dataclasses import dataclass
from pathlib import Path

from ingot.core.artifact import digest_json
from ingot.core.errors import MissingFile, UserError, shortened
from ingot.core.file_hashes import FileHashes
from ingot.corpus.packages import check_packages
from ingot.corpus.readers.content import Kind
from ingot.corpus.readers.python_library import TOPICS, library_files
from ingot.corpus.readers.remote import fetch, is_remote, remote_files, sha256_of
from ingot.corpus.readers.suffixes import PAGES, ROWS, SUFFIXES, inner_suffix, is_readable
from ingot.corpus.readers.walk import Skipped, describe, expand, glob_root, literal_brackets, walk
from ingot.corpus.settings import DOCS, STDLIB, CorpusSettings, Source


@dataclass(frozen=True)
class InputFile:
    """A file to read, and the `path` and `group` of its documents."""

    file: Path
    path: str
    group: str

    @property
    def kind(self) -> Kind:
        """What the suffix says."""
        return (ROWS | PAGES).get(inner_suffix(self.file.name), "text")

    @property
    def is_source(self) -> bool:
        """Whether the suffix says source code or markup."""
        return inner_suffix(self.file.name) in SUFFIXES - {".txt", ".text"}


def locate(source: Source) -> list[InputFile]:
    """The files of a source in reading order. Downloads remote files that are not in the cache.

    Raises:
        UserError: the source is missing or empty, cannot be downloaded, or has another sha256.
    """
    if source.path in (STDLIB, DOCS):
        files = [(group, file) for group, file in library_files() if source.path == DOCS or group != TOPICS]
        return [InputFile(file, group, group) for group, file in files]
    if source.path.startswith("python:"):
        raise UserError(f"sources: unknown source '{source.path}'; known: {DOCS}, {STDLIB}")
    if is_remote(source.path):
        return [InputFile(fetch(source, one), one.url, one.group(source.path)) for one in remote_files(source)]
    files, _ = _local(source)
    if source.sha256 is not None:
        _check_sha256(source, files)
    if all(f.file.stat().st_size == 0 for f in files):
        raise UserError(
            f"sources: '{source.path}' is empty (0 bytes in {len(files)} file(s)); put text into it or remove it"
        )
    return files


def source_digest(settings: CorpusSettings, hashes: FileHashes) -> str:
    """One digest of all raw inputs: names and contents of the source files, of the user's own filters, of the
    evaluations to keep out, and of lists of words.

    Raises:
        UserError: as `locate`; also for filters and models that do not load.
    """
    filters = []
    if settings.filters:
        from ingot.corpus.filters import load_filters, user_files  # imported late: polars is slow to import

        load_filters(settings.filters)
        filters = [hashes.digest(file) for file in user_files(settings.filters)]
    if settings.languages:
        from ingot.corpus.languages import check_languages

        check_languages(settings.languages)
    check_packages(settings)
    evaluations = [hashes.digest(evaluation_file(name)) for name in settings.decontaminate or ()]
    own: list[object] = [filters, evaluations] if evaluations else [filters]
    if settings.words:
        from ingot.corpus.word_lists import list_file

        own.append({name: hashes.digest(list_file(name, words)) for name, words in settings.words.items()})
    return digest_json([[_content(source, hashes) for source in settings.sources], *own])


def evaluation_file(name: str) -> Path:
    """A file of evaluations. Raises UserError if it is missing."""
    if not Path(name).is_file():
        raise MissingFile(f"decontaminate: found no file {name}, expected a file of evaluation items (rows or text)")
    return Path(name)


def _content(source: Source, hashes: FileHashes) -> object:
    if is_remote(source.path):
        files = remote_files(source)
        return source.sha256 or [[f.url, f.sha256] for f in files]
    return [[f.path, f.group, hashes.digest(f.file)] for f in locate(source)]


def not_read(source: Source) -> list[Skipped]:
    """What is in the directory (or below the glob) of a local source and is not read."""
    if source.path in (STDLIB, DOCS) or is_remote(source.path):
        return []
    return _local(source)[1]


def _local(source: Source) -> tuple[list[InputFile], list[Skipped]]:
    """The files of a local source, and what is not read."""
    name = source.path
    try:
        path = Path(name).expanduser()
        path.is_file()
    except (OSError, RuntimeError) as error:  # an invalid file name; an unknown user in `~user`
        raise UserError(f"sources: '{shortened(name)}' is no path ({error}); correct it") from None
    if path.is_file():
        return [InputFile(path, name, path.name)], []
    skipped: list[Skipped] = []
    if path.is_dir():
        below = walk(path, path, source.follow_links, is_readable, skipped)
        files = [_input_file(file, path, name.rstrip("/"), path) for file in below]
        return _nonempty(name, files, skipped), skipped
    if path.exists():
        raise UserError(f"sources: '{name}' is a pipe, socket or device, expected a regular file; save it as a file")
    if not glob.has_magic(name):
        raise MissingFile(
            f"sources: '{name}' does not exist (relative to {Path.cwd()}), expected a file, a directory, a glob, "
            f"{STDLIB}, {DOCS}, https://, hf://datasets/ or s3://; check the path"
        )
    pattern = literal_brackets(path)
    root = glob_root(pattern)
    matches = expand(pattern, root, source.follow_links, is_readable, skipped)
    found = {file: _input_file(file, match, str(match), root) for match, below in matches for file in below}
    return _nonempty(name, list(found.values()), skipped), skipped


def _input_file(file: Path, top: Path, name: str, root: Path) -> InputFile:
    """A file at or below `top`, which the recipe calls `name`; its group is relative to `root`."""
    path = name if file == top else f"{name}/{file.relative_to(top).as_posix()}"
    return InputFile(file, path, file.relative_to(root).as_posix())


def _nonempty(name: str, files: list[InputFile], skipped: list[Skipped]) -> list[InputFile]:
    for file in files:
        try:
            file.path.encode()
        except UnicodeEncodeError:
            raise UserError(f"sources: the file name {file.path!r} is not UTF-8; rename the file") from None
    if not files:
        unread = f"; not read: {describe(skipped)}" if skipped else ""
        brackets = "; [ ] is a pattern for one character, and [[] a bracket" if "[" in name else ""
        raise MissingFile(
            f"sources: '{name}' contains no readable file, expected at least one such as .txt, .md, .py, .jsonl, "
            f".csv.gz or .parquet{unread}; check the path, or name files with other suffixes one by one{brackets}"
        )
    return files


def _check_sha256(source: Source, files: list[InputFile]) -> None:
    if len(files) != 1:
        raise UserError(
            f"sources: '{source.path}' has a sha256 but is {len(files)} files; give a sha256 to single files only"
        )
    if (digest := sha256_of(files[0].file)) != source.sha256:
        raise UserError(
            f"sources: '{source.path}' has sha256 {digest}, expected {source.sha256}; correct the sha256 or the path"
        )
