"""Built-in data: the running interpreter's standard library as code and prose (`python_questions.py`: as questions).

Files are parsed with `ast` and never imported, because an import runs them and depends on the platform. In all formats
a document's group is the module's path in the library, so `holdout.by = "group"` holds out the same modules in each and
training has no question about a held-out module.

Excluded are tests, bundled packages, generated tables (codecs, build configuration) and, as code, the topics of the
language reference (one string literal; `python:docs` has them as text).
"""

import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ingot.core.errors import UserError

TOPICS = "pydoc_data/topics.py"

_SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib-dynload",
        "_bundled",
        "__phello__",
    }
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def library_files() -> list[tuple[str, Path]]:
    """(path relative to the library, file) of every module, sorted.

    Raises:
        UserError: the interpreter is installed without the sources of its library.
    """
    top = Path(sysconfig.get_path("stdlib"))
    modules: list[tuple[str, Path]] = []
    for directory, subdirectories, files in os.walk(top):
        subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED and not d.startswith(("config-", "."))]
        paths = (Path(directory, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata"))
        modules += [(p.relative_to(top).as_posix(), p) for p in paths]
    modules = sorted((group, file) for group, file in modules if not _is_codec_table(group))
    if not modules:
        raise UserError(f"sources: no library sources in {top}; use a Python that has them, or another source")
    return modules


def _is_codec_table(group: str) -> bool:
    """Whether the module is a code page, such as `encodings/cp1252.py`."""
    name = group.removeprefix("encodings/")
    return name != group and re.match(r"(cp|iso|mac_|koi|kz|ptcp|tis|hp_|palmos)", name) is not None


def docs_texts(file: Path, group: str) -> Iterator[tuple[str, None]]:
    """The docstrings of a module as one document; of the `TOPICS` module each topic as a document."""
    tree = parsed(file)
    if tree is None:
        return
    if group == TOPICS:
        yield from ((topic, None) for topic in _topics(tree))
        return
    module = module_name(group)
    sections = [f"{module}\n\n{doc}" for doc in [ast.get_docstring(tree)] if doc]
    for name, node, _ in public(tree, module):
        if doc := ast.get_docstring(node):
            title = f"class {name}" if isinstance(node, ast.ClassDef) else signature(name, node)
            sections.append(f"{title}\n\n{doc}")
    if sections:
        yield "\n\n".join(sections) + "\n", None


def signature(name: str, node: ast.AST, drop_self: bool = False) -> str:
    """The signature, e.g. `json.loads(s, *, cls=None, **kw)`; `drop_self` removes a method's `self` or `cls`."""
    assert isinstance(node, Function)
    arguments = ast.unparse(node.args)
    if drop_self and not is_static(node):
        arguments = re.sub(r"^\w+(?:, /)?(?:, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({arguments}){returns}"


def is_static(node: Function) -> bool:
    """Whether a method gets no `self` or `cls`."""
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


def public(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.ClassDef | Function, bool]]:
    """(dotted name, definition, whether in a class) of all public definitions; of equal names the first one."""
    seen: set[str] = set()
    for node in _definitions(tree.body):
        inner = _definitions(node.body) if isinstance(node, ast.ClassDef) else ()
        members = [(f"{module}.{node.name}.{m.name}", m, True) for m in inner if isinstance(m, Function)]
        for name, definition, in_class in [(f"{module}.{node.name}", node, False), *members]:
            private = node.name.startswith("_") or definition.name.startswith("_")
            if not private and name not in seen:
                seen.add(name)
                yield name, definition, in_class


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Definitions at this level, including those inside `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            yield from _definitions([*node.body, *handlers, *getattr(node, "orelse", [])])


@cache
def topic_words() -> list[str]:
    """The distinct words of the language reference in lower case, sorted."""
    files = dict(library_files())
    tree = parsed(files[TOPICS]) if TOPICS in files else None
    text = " ".join(_topics(tree)) if tree else ""
    return sorted(set(re.findall(r"[a-z]{2,10}", text.lower()))) or ["name"]


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "topics":
            yield from ast.literal_eval(node.value).values()


def module_name(group: str) -> str:
    """`json/__init__.py` -> `json`, `json/decoder.py` -> `json.decoder`."""
    return group.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parsed(file: Path) -> ast.Module | None:
    """The parsed module; None for a file that this Python cannot parse (the library contains templates)."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None
