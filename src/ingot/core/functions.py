"""User functions that a recipe names as `"file.py:function"`: filters, rewards, judges.

`function_files` lists everything that determines what a function returns: its file, the modules of the user that this
imports, and the data files that they name. All are part of the key of the stage that names the function, so editing one
runs the stage again. They are found by parsing, without executing anything; `user_modules.py` loads the modules and
refuses to read files of the project that were not found.
"""

import ast
import functools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.user_modules import Directory, Reads, execute, locate

_RECIPES = Path(__file__).parents[1] / "recipes"
FILES = "FILES"
"""Variable of a user's file: the list of the data files that it reads."""


def is_function(name: str) -> bool:
    """Whether a name has the form `"file.py:function"`."""
    return ".py:" in name


def file_of(name: str) -> Path:
    """The file of `"file.py:function"`, relative to the working directory; without a directory also one of the files
    that ship beside the recipes, such as answers.py."""
    file = Path(name.rpartition(":")[0])
    shipped = _RECIPES / file.name
    return shipped if len(file.parts) == 1 and not file.exists() and shipped.is_file() else file


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Execute the file of `"file.py:function"` and return the function.

    Args:
        name: the file (see `file_of`) and the function.
        where: the setting that names it, for errors.

    Raises:
        UserError: the file does not exist, does not load, has no such function, or reads files that are not part of the
            key; the returned function raises the latter, too.
    """
    function = name.rpartition(":")[2]
    files = function_files(name, where)
    file, directory = files[0], Directory.of(files[0].parent)
    reads = Reads(files, [Path.cwd(), file.parent])
    try:
        with reads.watched(f"{where}: '{name}'"), directory.active():
            module = execute(file)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: '{name}': {file} does not load ({type(error).__name__}: {error}); fix it") from error
    value = getattr(module, function, None)
    if not callable(value):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")

    @functools.wraps(value)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with reads.watched(f"{where}: '{name}'"), directory.active():
            return value(*arguments, **keywords)

    return call


def require_file(name: str, where: str) -> Path:
    """The file of a function, parsed and not executed.

    Raises:
        UserError: the file does not exist, is not Python, or defines no such function.
    """
    file, function = file_of(name), name.rpartition(":")[2]
    if not file.is_file():
        raise MissingFile(f"{where}: '{name}': no file {file}; expected \"file.py:function\" relative to {Path.cwd()}")
    known = set(_names(_parse(file, name, where)))
    if function not in known and "*" not in known:
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")
    return file


def function_files(name: str, where: str) -> list[Path]:
    """The files that determine what a function returns, its own first, the others sorted.

    Modules count if they are beside the file or on PYTHONPATH, and not installed. Data files are those in the list
    `FILES` of a module, relative to the working directory or to the module; a module without that list counts every
    string in it that is the name of an existing file, also one that is written in parts.

    Raises:
        UserError: as `require_file`, and for a module that is not Python or an entry of `FILES` that does not exist.
    """
    file = require_file(name, where)
    sources: dict[Path, ast.AST] = {}
    found: set[Path] = set()
    waiting = [(file, "")]
    while waiting:
        source, package = waiting.pop()
        if source in sources or source in found:
            continue
        if source.suffix != ".py":  # a compiled module
            found.add(source)
            continue
        tree = sources[source] = _parse(source, name, where)
        for imported in _imports(tree, package):
            waiting += _module_files(imported, file.parent)
    for source, tree in sources.items():
        found.update(_data_files(source, tree, f"{where}: '{name}'"))
    return [file, *sorted(p for p in found | sources.keys() if not p.samefile(file))]


def _parse(file: Path, name: str, where: str) -> ast.AST:
    try:
        return ast.parse(file.read_bytes(), file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: '{name}': {file} is not Python ({error}); fix it") from None


def _names(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines or imports; `*` for a star import, whose names are unknown before it is executed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module may import; for `from a import b` also a.b, which may be a module.

    Args:
        tree: the module.
        package: the package that relative imports refer to; "" for a module outside of packages.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, parents), *([node.module] if node.module else [])])
            yield from filter(None, (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _module_files(name: str, directory: Path) -> list[tuple[Path, str]]:
    """The user's files that importing a dotted name executes, each with its package."""
    files, parts, locations = [], name.split("."), None
    for end in range(1, len(parts) + 1):
        spec = locate(".".join(parts[:end]), directory, locations)
        if spec is None:
            break
        if spec.origin:  # a namespace package has none
            files.append((_relative(spec.origin), spec.name if spec.submodule_search_locations else spec.parent or ""))
        if spec.submodule_search_locations is None:
            break
        locations = list(spec.submodule_search_locations)
    return files


def _data_files(source: Path, tree: ast.AST, where: str) -> Iterator[Path]:
    """The data files that a module names."""
    for node in ast.iter_child_nodes(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(t, ast.Name) and t.id == FILES for t in targets):
            for name in _list_of_files(value, source, where):
                yield from _named_files(name, source, where)
            return
    for node in ast.walk(tree):
        if name := "/".join(_parts(node)):
            yield from (path for path in _candidates(name, source) if _is_regular(path))


def _parts(node: ast.AST) -> list[str]:
    """The strings that an expression makes a path of: one string, or those after the directory of the module, as in
    `Path(__file__).parent / "lists" / "banned.json"` and `os.path.join(here, "lists", "banned.json")`."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.BinOp(op=ast.Div(), left=left, right=ast.Constant(value=str(text))):
            return [*_parts(left), text]
        case ast.Call(func=ast.Name(id="Path") | ast.Attribute(attr="Path" | "join" | "joinpath"), args=arguments):
            return [text for argument in arguments for text in _parts(argument)]
    return []


def _list_of_files(value: ast.AST, source: Path, where: str) -> list[str]:
    try:
        names = ast.literal_eval(ast.unparse(value))
    except (ValueError, SyntaxError, RecursionError):
        names = None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{where}: {source}: found {FILES} = {ast.unparse(value)}, expected a list of names of files, written out, "
            f'such as {FILES} = ["banned.json"]; the files are part of the key before the file is executed'
        )
    return list(names)


def _named_files(name: str, source: Path, where: str) -> Iterator[Path]:
    """The files that an entry of `FILES` names; of a directory, all files below it."""
    existing = [path for path in _candidates(name, source) if _is_regular(path) or path.is_dir()]
    if not existing:
        raise UserError(
            f"{where}: {source}: {FILES} names '{name}', which does not exist beside {source.name} or relative to "
            f"{Path.cwd()}; correct the name or remove it"
        )
    for path in existing:
        yield from (p for p in path.rglob("*") if _is_regular(p)) if path.is_dir() else (path,)


def _candidates(name: str, source: Path) -> list[Path]:
    """The paths that a name may mean: relative to the working directory and to the module."""
    if not name or len(name) > 500 or not name.isprintable():
        return []
    path = Path(os.path.expanduser(name))
    return [path] if path.is_absolute() else [_relative(p) for p in dict.fromkeys((path, source.parent / path))]


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _relative(path: str | Path) -> Path:
    """The path relative to the working directory if it is below that, so that messages are short."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
