"""User functions that a recipe names as `"file.py:function"`: filters, rewards, judges.

The file's content is part of the key of the stage that names it, so editing a function runs the stage again.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import MissingFile, UserError, nearest


def is_function(name: str) -> bool:
    """Whether a name has the form `"file.py:function"`."""
    return ".py:" in name


def file_of(name: str) -> Path:
    """The file of `"file.py:function"`."""
    return Path(name.rpartition(":")[0])


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Execute the file of `"file.py:function"` and return the function.

    Args:
        name: the file, relative to the working directory, and the function.
        where: the setting that names it, for errors.

    Raises:
        UserError: the file does not exist, does not load, or has no such function.
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
        raise UserError(f"{where}: '{name}': {file} does not load ({type(error).__name__}: {error}); fix it") from error
    value = getattr(module, function, None)
    if not callable(value):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")
    return value


def require_file(name: str, where: str) -> Path:
    """The file of a function, parsed and not executed.

    Raises:
        UserError: the file does not exist, is not Python, or defines no such function.
    """
    file, function = file_of(name), name.rpartition(":")[2]
    if not file.is_file():
        raise MissingFile(f"{where}: '{name}': no file {file}; expected \"file.py:function\" relative to {Path.cwd()}")
    try:
        known = set(_names(ast.parse(file.read_bytes(), file.name)))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: '{name}': {file} is not Python ({error}); fix it") from None
    if function not in known and "*" not in known:
        raise UserError(f"{where}: '{name}': {file} has no function '{function}'; {nearest(function, known)}")
    return file


def _names(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines or imports; `*` for a star import, whose names are unknown before it is executed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
