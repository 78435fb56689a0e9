"""Functions of the user's own, named in a recipe as `"file.py:function"`: filters, rewards, judges.

The file's content is part of the key of the stage that names it, so an edited function runs the stage again.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import MissingFile, UserError, nearest


def is_function(name: str) -> bool:
    """Whether a name says a function in a file."""
    return ".py:" in name


def file_of(name: str) -> Path:
    """The file of `"file.py:function"`."""
    return Path(name.rpartition(":")[0])


def load_function(name: str, where: str) -> Callable[..., Any]:
    """The function that `"file.py:function"` names, its file run once.

    Args:
        name: the file relative to the working directory, and the function.
        where: the setting, as errors name it.

    Raises:
        UserError: no such file, not Python, it does not load, or it has no such function.
    """
    file, function = file_of(name), name.rpartition(":")[2]
    require_file(name, where)
    spec = importlib.util.spec_from_file_location(f"ingot_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: '{name}': {file} is not a Python file; name a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"{where}: '{name}': {file} does not load ({type(error).__name__}: {error}); mend it"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")
    return found


def require_file(name: str, where: str) -> Path:
    """The file of a function, which is read but not run.

    Raises:
        UserError: it does not exist, is not Python, or plainly has no such function.
    """
    file, function = file_of(name), name.rpartition(":")[2]
    if not file.is_file():
        raise MissingFile(f"{where}: '{name}': no file {file}; expected \"file.py:function\" relative to {Path.cwd()}")
    try:
        known = set(_names(ast.parse(file.read_bytes(), file.name)))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: '{name}': {file} is not Python ({error}); mend it") from None
    if function not in known and "*" not in known:
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")
    return file


def _names(tree: ast.AST) -> Iterator[str]:
    """What is defined anywhere in a file; `*` where only running it would tell."""
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.alias):
            yield part.asname or part.name
