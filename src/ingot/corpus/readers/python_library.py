"""Real text that every machine has: the running interpreter's own library, as code, as prose and as conversations.

Files are read with `ast`, never imported: importing would run them, and would describe this machine. All forms
name a document's group alike (the module's path in the library), so `holdout.by = "group"` holds out the same modules
in each and no question about a held-out module is asked in training.

Left out: tests, bundled packages, tables that a program wrote (codecs, build configuration) and the topics of the
language reference as code (they are one string literal; `python:docs` has them as text).
"""

import ast
import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ingot.core.errors import UserError
from ingot.corpus.readers.row_formats import dump_document

TOPICS = "pydoc_data/topics.py"
ANSWER_CHARACTERS = 400

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
_NO_QUESTIONS = frozenset(
    {"idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip", "distutils", "msilib"}
)
_QUESTIONS = {
    "module": ("What is the {0} module for?", "What does the module {0} do?", "Tell me about the Python module {0}."),
    "class": ("What is {0}?", "What is the class {0} for?", "Describe the class {0}."),
    "function": ("What does {0} do?", "What is {0} for?", "Explain {0}."),
    "method": ("What does {0} do?", "What does the method {0} do?", "Explain the method {0}."),
    "signature": ("What is the signature of {0}?", "How do I call {0}?", "Which arguments does {0} take?"),
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def library_files() -> list[tuple[str, Path]]:
    """(path relative to the library, file) of every module, sorted.

    Raises:
        UserError: this interpreter came without its library's sources.
    """
    top = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, Path]] = []
    for directory, subdirectories, files in os.walk(top):
        subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED and not d.startswith(("config-", "."))]
        paths = (Path(directory, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata"))
        found += [(p.relative_to(top).as_posix(), p) for p in paths]
    kept = sorted((group, file) for group, file in found if not _is_table(group))
    if not kept:
        raise UserError(f"sources: no library sources in {top}; use a Python that has them, or another source")
    return kept


def _is_table(group: str) -> bool:
    """Codec tables: `encodings/cp1252.py` and its like, named by code page."""
    name = group.removeprefix("encodings/")
    return name != group and re.match(r"(cp|iso|mac_|koi|kz|ptcp|tis|hp_|palmos)", name) is not None


def docs_texts(file: Path, group: str) -> Iterator[tuple[str, None]]:
    """Prose of one module: its docstrings as one document; every topic of the language reference as its own."""
    tree = _tree(file)
    if tree is None:
        return
    if group == TOPICS:
        yield from ((topic, None) for topic in _topics(tree))
        return
    module = _module(group)
    parts = [f"{module}\n\n{doc}" for doc in [ast.get_docstring(tree)] if doc]
    for name, node, _ in _public(tree, module):
        if doc := ast.get_docstring(node):
            title = f"class {name}" if isinstance(node, ast.ClassDef) else signature(name, node)
            parts.append(f"{title}\n\n{doc}")
    if parts:
        yield "\n\n".join(parts) + "\n", None


def docs_chats(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Conversations about one module: a question, and an answer of at most 400 characters."""
    for _, question, answer in _asked(file, group):
        yield dump_document([_said("user", question), _said("assistant", answer)]), None


def docs_preferences(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Pairs: what a docstring says, and the same words in an order drawn by the question.

    The worse side has the better one's length, words and topic, so nothing but the language tells them apart; and no
    word of a held-out module gets into training, as it would if another module's docstring were the worse side.
    """
    for kind, question, answer in _asked(file, group):
        if kind != "signature":
            sides = {
                "chosen": [_said("assistant", answer)],
                "rejected": [_said("assistant", _shuffled(answer, question))],
            }
            yield dump_document({"prompt": [_said("user", question)], **sides}), None


def docs_prompts(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """The questions of `docs_preferences`, each with the docstring's `answer` as a further field."""
    for kind, question, answer in _asked(file, group):
        if kind != "signature":
            yield dump_document([_said("user", question)]), dump_document({"answer": answer})


def _asked(file: Path, group: str) -> Iterator[tuple[str, str, str]]:
    """(kind, question, answer) of all there is to ask about one module.

    What has no docstring is not asked about, nor are the arguments of what takes none: a small model then learns
    answers rather than a thousand ways to say nothing.
    """
    module = _module(group)
    parts = module.split(".")
    if parts[0] in _NO_QUESTIONS or any(p.startswith("_") for p in parts):
        return
    tree = _tree(file)
    if tree is None:
        return
    if answer := short_answer(ast.get_docstring(tree)):
        yield "module", _question("module", module), answer
    for name, node, in_class in _public(tree, module):
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if in_class else "function"
        answer = short_answer(ast.get_docstring(node))
        if not answer:
            continue
        yield kind, _question(kind, name), answer
        if isinstance(node, _Function):
            answer = signature(name, node, in_class)
            if "()" not in answer and len(answer) <= ANSWER_CHARACTERS:
                yield "signature", _question("signature", name), answer


def _question(kind: str, name: str) -> str:
    """The phrasing is chosen by the name, so it stays the same when other modules change."""
    phrasings = _QUESTIONS[kind]
    return phrasings[_draw(f"{kind} {name}") % len(phrasings)].format(name)


def _shuffled(text: str, by: str) -> str:
    words = text.split()
    order = sorted(range(len(words)), key=lambda i: (_draw(f"{by} {i}"), i))
    return " ".join(words[i] for i in order)


def _draw(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def short_answer(docstring: str | None) -> str:
    """The first paragraph on one line, whole sentences up to 400 characters; "" where there is none."""
    if not docstring:
        return ""
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    if len(text) > ANSWER_CHARACTERS:
        text = text[: text.rfind(". ", 0, ANSWER_CHARACTERS) + 1]
    return text if len(text.split()) >= 3 else ""


def signature(name: str, node: ast.AST, drop_self: bool = False) -> str:
    """How the function is called, e.g. `json.loads(s, *, cls=None, **kw)`; `self` or `cls` left out for methods."""
    assert isinstance(node, _Function)
    arguments = ast.unparse(node.args)
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if drop_self and not static:
        arguments = re.sub(r"^\w+(?:, /)?(?:, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({arguments}){returns}"


def _public(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.ClassDef | _Function, bool]]:
    """(dotted name, definition, whether in a class) of all public definitions; the first of a name."""
    seen: set[str] = set()
    for node in _definitions(tree.body):
        inner = _definitions(node.body) if isinstance(node, ast.ClassDef) else ()
        members = [(f"{module}.{node.name}.{m.name}", m, True) for m in inner if isinstance(m, _Function)]
        for name, found, in_class in [(f"{module}.{node.name}", node, False), *members]:
            private = node.name.startswith("_") or found.name.startswith("_")
            if not private and name not in seen:
                seen.add(name)
                yield name, found, in_class


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | _Function]:
    """Definitions at this level, also those under `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.ClassDef | _Function):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            yield from _definitions([*node.body, *handlers, *getattr(node, "orelse", [])])


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "topics":
            yield from ast.literal_eval(node.value).values()


def _module(group: str) -> str:
    """`json/__init__.py` -> `json`, `json/decoder.py` -> `json.decoder`."""
    return group.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _tree(file: Path) -> ast.Module | None:
    """The parsed module; None for a file that is not Python of this version (library templates)."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None
