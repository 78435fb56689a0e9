"""Built-in data: the running interpreter's standard library as code, prose, conversations, pairs and prompts.

Files are parsed with `ast` and never imported, because an import runs them and depends on the platform. In all formats
a document's group is the module's path in the library, so `holdout.by = "group"` holds out the same modules in each and
training has no question about a held-out module.

Excluded are tests, bundled packages, generated tables (codecs, build configuration) and, as code, the topics of the
language reference (one string literal; `python:docs` has them as text).
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
    tree = _tree(file)
    if tree is None:
        return
    if group == TOPICS:
        yield from ((topic, None) for topic in _topics(tree))
        return
    module = _module(group)
    sections = [f"{module}\n\n{doc}" for doc in [ast.get_docstring(tree)] if doc]
    for name, node, _ in _public(tree, module):
        if doc := ast.get_docstring(node):
            title = f"class {name}" if isinstance(node, ast.ClassDef) else signature(name, node)
            sections.append(f"{title}\n\n{doc}")
    if sections:
        yield "\n\n".join(sections) + "\n", None


def docs_chats(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Conversations about a module: a question, and an answer of at most 400 characters."""
    for _, question, answer in _questions(file, group):
        yield dump_document([_message("user", question), _message("assistant", answer)]), None


def docs_preferences(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Pairs: the answer of the docstring (chosen), and its words in a random order seeded by the question (rejected).

    Both answers have the same length, words and topic, so only word order distinguishes them. An answer from another
    module would leak held-out modules into training.
    """
    for kind, question, answer in _questions(file, group):
        if kind != "signature":
            answers = {
                "chosen": [_message("assistant", answer)],
                "rejected": [_message("assistant", _shuffled(answer, question))],
            }
            yield dump_document({"prompt": [_message("user", question)], **answers}), None


def docs_prompts(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """The questions of `docs_preferences`, each with the docstring's answer as the extra field `answer`."""
    for kind, question, answer in _questions(file, group):
        if kind != "signature":
            yield dump_document([_message("user", question)]), dump_document({"answer": answer})


def _questions(file: Path, group: str) -> Iterator[tuple[str, str, str]]:
    """(kind, question, answer) about a module's definitions.

    Definitions without a docstring and signatures without arguments are skipped, so that a small model does not train
    on empty answers.
    """
    module = _module(group)
    names = module.split(".")
    if names[0] in _NO_QUESTIONS or any(name.startswith("_") for name in names):
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
    """A question about `name`. A hash of the name chooses the phrasing, so it does not depend on other modules."""
    phrasings = _QUESTIONS[kind]
    return phrasings[_hash(f"{kind} {name}") % len(phrasings)].format(name)


def _shuffled(text: str, seed: str) -> str:
    words = text.split()
    order = sorted(range(len(words)), key=lambda i: (_hash(f"{seed} {i}"), i))
    return " ".join(words[i] for i in order)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def short_answer(docstring: str | None) -> str:
    """The first paragraph on one line, cut after a sentence to at most 400 characters; "" if there is none."""
    if not docstring:
        return ""
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    if len(text) > ANSWER_CHARACTERS:
        text = text[: text.rfind(". ", 0, ANSWER_CHARACTERS) + 1]
    return text if len(text.split()) >= 3 else ""


def signature(name: str, node: ast.AST, drop_self: bool = False) -> str:
    """The signature, e.g. `json.loads(s, *, cls=None, **kw)`; `drop_self` removes a method's `self` or `cls`."""
    assert isinstance(node, _Function)
    arguments = ast.unparse(node.args)
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if drop_self and not static:
        arguments = re.sub(r"^\w+(?:, /)?(?:, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({arguments}){returns}"


def _public(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.ClassDef | _Function, bool]]:
    """(dotted name, definition, whether in a class) of all public definitions; of equal names the first one."""
    seen: set[str] = set()
    for node in _definitions(tree.body):
        inner = _definitions(node.body) if isinstance(node, ast.ClassDef) else ()
        members = [(f"{module}.{node.name}.{m.name}", m, True) for m in inner if isinstance(m, _Function)]
        for name, definition, in_class in [(f"{module}.{node.name}", node, False), *members]:
            private = node.name.startswith("_") or definition.name.startswith("_")
            if not private and name not in seen:
                seen.add(name)
                yield name, definition, in_class


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | _Function]:
    """Definitions at this level, including those inside `if`, `try` and `with`."""
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
    """The parsed module; None for a file that this Python cannot parse (the library contains templates)."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None
