"""Loads a user's Python file and what it imports from its directory, and watches the files that it reads.

Code of one directory sees the modules of that directory and of no other one, because two directories may have modules
of the same name: the modules are in `sys.modules` only while code of their directory runs.
"""

import contextlib
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from importlib.util import module_from_spec, source_from_cache, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from ingot.core.errors import UserError

_PYTHON = frozenset({"ingot", *sys.stdlib_module_names})
"""Names that never refer to a user's module."""
_INSTALLED = {
    os.path.realpath(directory)
    for directory in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
}
"""Directories of Python and of installed packages."""


class _SourceLoader(SourceFileLoader):
    """Compiles the source at every load: the .pyc of a file that was edited twice within a second may be outdated."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class Directory(MetaPathFinder):
    """The modules and packages below a directory; `Directory.of(path)` returns the only instance for a path."""

    _known: ClassVar[dict[str, "Directory"]] = {}
    _turn: ClassVar = threading.Condition()
    _current: ClassVar["Directory | None"] = None
    """The directory whose modules are in `sys.modules`."""
    _running: ClassVar[int] = 0
    """Number of threads that execute its code."""

    def __init__(self, path: str):
        self.path = path
        self._found: set[str] = set()
        """Names of the modules that were imported from here."""
        self._modules: dict[str, ModuleType] = {}
        """These modules, while no code of the directory runs."""
        self._hidden: dict[str, ModuleType] = {}
        """Modules of the same names from elsewhere, while code of the directory runs."""

    @classmethod
    def of(cls, path: Path) -> "Directory":
        absolute = os.path.abspath(path)
        return cls._known.setdefault(absolute, cls(absolute))

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Find a module for `import` (`importlib.abc.MetaPathFinder`)."""
        spec = self.locate(fullname, path)
        if spec is not None:
            self._found.add(fullname)
        return spec

    def locate(self, fullname: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
        """Find a module below the directory without importing it.

        Args:
            fullname: its dotted name.
            path: where its package is searched; None for a module outside of packages.
        """
        if fullname.partition(".")[0] in _PYTHON:
            return None
        for folder in [self.path] if path is None else path:
            if _is_below(folder, self.path):
                loaders = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES))
                spec = FileFinder(folder, *loaders).find_spec(fullname)
                # as in Python, a directory without __init__.py is a package only where nothing else has its name
                if spec is not None and (spec.loader or PathFinder.find_spec(fullname, path) is None):
                    return spec
        return None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let imports find the modules of the directory. Code of another directory waits meanwhile."""
        cls = Directory
        with cls._turn:
            cls._turn.wait_for(lambda: cls._current in (None, self))
            if cls._current is None:
                cls._current = self
                self._enter()
            cls._running += 1
        try:
            yield
        finally:
            with cls._turn:
                cls._running -= 1
                if cls._running == 0:
                    self._leave()
                    cls._current = None
                    cls._turn.notify_all()

    def _enter(self) -> None:
        here = {name.partition(".")[0] for name in os.listdir(self.path)}
        tops = {name for name in here & sys.modules.keys() if self.locate(name)}
        self._hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
        for name in self._hidden:
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self)

    def _leave(self) -> None:
        sys.meta_path.remove(self)
        self._modules = {name: sys.modules.pop(name) for name in self._found if name in sys.modules}
        sys.modules.update(self._hidden)


def execute(file: Path) -> ModuleType:
    """Execute a user's file as a new module, in `Directory.active`."""
    name = f"ingot_user_{file.stem}_{abs(hash(os.path.abspath(file))):x}"
    spec = spec_from_file_location(name, file, loader=_SourceLoader(name, os.path.abspath(file)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locate(fullname: str, directory: Path, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a user's module without importing it: below the directory of the user's file, or on PYTHONPATH.

    Args:
        fullname: its dotted name.
        directory: the directory.
        path: where its package is searched; None for a module outside of packages.

    Returns:
        None for a module that is installed, or that does not exist.
    """
    if spec := Directory.of(directory).locate(fullname, path):
        return spec
    if fullname.partition(".")[0] in _PYTHON:
        return None
    # the first entry of sys.path depends on how the process was started, unless Python was told to leave it out
    spec = PathFinder.find_spec(fullname, sys.path[not sys.flags.safe_path :] if path is None else path)
    places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return None if not places or any(map(_is_installed, places)) else spec


class Reads:
    """Watches which files of the project a user's code reads.

    A file counts if it is below the working directory or the directory of the code, and neither hidden nor installed.
    Only files that Python opens are seen, not those that a library opens in C.

    Args:
        files: the files that are part of the key.
        bases: the directories of the project.
    """

    _thread = threading.local()
    _installed = False

    def __init__(self, files: Sequence[Path], bases: Sequence[Path]):
        self._known = {os.path.realpath(file) for file in files}
        self._bases = tuple({os.path.realpath(base) for base in bases})
        self._written: set[str] = set()
        self._unknown: list[str] = []
        self._changed: list[str] = []

    @contextlib.contextmanager
    def watched(self, where: str) -> Iterator[None]:
        """Watch the files that this thread opens.

        Args:
            where: the setting that names the code, for errors.

        Raises:
            UserError: at the end, if the code has read a file that is not part of the key, or written one that is.
        """
        if not Reads._installed:
            Reads._installed = True
            sys.addaudithook(Reads._on_event)
        outer = getattr(Reads._thread, "reads", None)
        Reads._thread.reads = self
        try:
            yield
        finally:
            Reads._thread.reads = outer
        if self._unknown:
            raise UserError(
                f"{where}: it reads {os.path.relpath(self._unknown[0])}, which is not part of the stage's key, so a "
                'change of that file would go unnoticed; list the files that it reads in FILES = ["..."] at its top'
            )
        if self._changed:
            raise UserError(
                f"{where}: it writes {os.path.relpath(self._changed[0])}, which is part of the stage's key because the "
                'code names it; list only the files that it reads in FILES = ["..."] at its top (or FILES = [])'
            )

    @staticmethod
    def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and (reads := getattr(Reads._thread, "reads", None)) is not None:
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike):
                reads._opened(os.path.realpath(os.fsdecode(path)), bool(flags & (os.O_WRONLY | os.O_RDWR)))

    def _opened(self, path: str, writes: bool) -> None:
        if writes:
            self._written.add(path)
            self._changed += [path] if path in self._known else []
            return
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):
                path = source_from_cache(path)
        if path in self._known or path in self._written or not os.path.isfile(path) or _is_installed(path):
            return
        for base in self._bases:
            if _is_below(path, base) and not any(p.startswith(".") for p in Path(path).relative_to(base).parts):
                self._unknown.append(path)
                return


def _is_below(path: str, directory: str) -> bool:
    return os.path.commonpath((directory, os.path.abspath(path))) == directory


def _is_installed(path: str) -> bool:
    return any(_is_below(os.path.realpath(path), directory) for directory in _INSTALLED)
