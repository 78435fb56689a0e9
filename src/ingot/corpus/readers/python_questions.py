"""`python:docs` as conversations, pairs and prompts: questions about definitions in the interpreter's standard library.

Every answer follows from the text of its question (a name or a signature), so that a small model can learn to answer
about modules that it has never seen, and an answer is checked by comparison. What a function does is not asked: that
takes knowledge, which a model of a few million parameters does not have. Conversations ask each question again about
made-up names, because a model would rather remember the few thousand names of the library than learn to read.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.corpus.readers.python_library import Function, is_static, module_name, parsed, public, signature, topic_words
from ingot.corpus.readers.row_formats import dump_document

MAX_SIGNATURE_CHARACTERS = 100
NONE = "none"
"""The answer if no argument is required, or optional."""
NONE_EVERY = 4
"""One in so many of the questions whose answer is `NONE` is asked; else most answers about arguments would be it."""
MADE_UP = 3
"""Questions about made-up names for each one about a real name."""

_NO_QUESTIONS = frozenset(
    {"idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip", "distutils", "msilib"}
)
_PHRASINGS = {
    "import": ("What do I import for {0}?", "Which module defines {0}?", "How do I import {0}?"),
    "class": ("Which class has the method {0}?", "What is the class of {0}?"),
    "required": ("What does {0} need?", "Which arguments does {0} require?"),
    "optional": ("Which arguments of {0} are optional?", "What can I leave out of {0}?"),
    "default": ("What is the default of {1} in {0}?", "Which value has {1} by default in {0}?"),
}
_ANSWERS = {
    "import": "import {0}",
    "class": "class {0}",
    "required": "needs {0}",
    "optional": "only {0}",
    "default": "by default {0}",
}
"""A word before the answer, because a tokenizer encodes a name after a space as in the question."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_CONSTANTS = frozenset({"None", "True", "False", NONE})


@dataclass(frozen=True)
class Question:
    kind: str
    subject: tuple[str, ...]
    """The name or signature that it is about, and further names."""
    reply: str
    """The part of the answer that is read out of the subject."""

    @property
    def text(self) -> str:
        """The question. A hash of the subject chooses the phrasing, which so depends on no other module."""
        phrasings = _PHRASINGS[self.kind]
        return phrasings[_hash(f"{self.kind} {self.subject}") % len(phrasings)].format(*self.subject)

    @property
    def answer(self) -> str:
        return _ANSWERS[self.kind].format(self.reply)

    @property
    def wrong_answer(self) -> str:
        """The answer with a mistake: a part is left out, or another name of the question is in its place."""
        separator = "." if self.kind in ("import", "class") else ", "
        parts, choice = self.reply.split(separator), _hash(f"wrong {self.kind} {self.subject}")
        place = choice % len(parts)
        others = [name for name in _NAME.findall(" ".join(self.subject)) if name not in _NAME.findall(self.reply)]
        if len(parts) > 1 and (choice % 3 == 0 or not others):
            parts.pop(place)
        else:
            parts[place] = others[choice // 3 % len(others)] if others else NONE
        return _ANSWERS[self.kind].format(separator.join(parts))


def docs_chats(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Conversations about a module: a question and its answer, then the same with made-up names."""
    asked = list(questions(file, group))
    for question in [*asked, *(made_up(q, n) for n in range(MADE_UP) for q in asked)]:
        yield dump_document([_message("user", question.text), _message("assistant", question.answer)]), None


def docs_preferences(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """Pairs: the right answer (chosen), and one with a mistake that a model makes (rejected)."""
    for question in questions(file, group):
        answers = {"chosen": question.answer, "rejected": question.wrong_answer}
        messages = {name: [_message("assistant", answer)] for name, answer in answers.items()}
        yield dump_document({"prompt": [_message("user", question.text)], **messages}), None


def docs_prompts(file: Path, group: str) -> Iterator[tuple[str, str | None]]:
    """The questions about real names, each with its answer as the extra field `answer`."""
    for question in questions(file, group):
        yield dump_document([_message("user", question.text)]), dump_document({"answer": question.answer})


def questions(file: Path, group: str) -> Iterator[Question]:
    """The questions about a module's public definitions; none about modules that are not public."""
    module = module_name(group)
    names = module.split(".")
    tree = None if names[0] in _NO_QUESTIONS or any(name.startswith("_") for name in names) else parsed(file)
    if tree is None:
        return
    for name, node, in_class in public(tree, module):
        yield Question("class" if in_class else "import", (name,), name.rpartition(".")[0])
        if isinstance(node, Function):
            yield from _about_arguments(name, node, in_class)


def _about_arguments(name: str, node: Function, in_class: bool) -> Iterator[Question]:
    """Questions that quote the signature, which is short enough to be read at a glance."""
    call = signature(name, node, in_class)
    required, defaults = _arguments(node, skip_first=in_class and not is_static(node))
    if len(call) > MAX_SIGNATURE_CHARACTERS or not (required or defaults):
        return
    for kind, names in (("required", required), ("optional", list(defaults))):
        if names or _hash(f"{kind} {name}") % NONE_EVERY == 0:
            yield Question(kind, (call,), ", ".join(names) or NONE)
    if defaults:
        argument = list(defaults)[_hash(name) % len(defaults)]
        yield Question("default", (call, argument), f"{argument}={defaults[argument]}")


def _arguments(node: Function, skip_first: bool) -> tuple[list[str], dict[str, str]]:
    """The required arguments, and the optional ones with their defaults; `*args` and `**kwargs` are neither.

    Args:
        skip_first: leave out the first argument, which a method call does not write.
    """
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    optional = positional[len(positional) - len(given.defaults) :]
    required = [argument.arg for argument in positional[skip_first : len(positional) - len(optional)]]
    defaults = dict(zip(optional, given.defaults, strict=True))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if default is None:
            required.append(argument.arg)
        else:
            defaults[argument] = default
    return required, {argument.arg: ast.unparse(default) for argument, default in defaults.items()}


def made_up(question: Question, number: int) -> Question:
    """The question with every name replaced by a made-up one; `number` chooses among many such questions."""
    seed = f"{number} {question.subject[0]}"

    def rename(text: str) -> str:
        return _NAME.sub(lambda name: _word(name[0], seed), text)

    return Question(question.kind, tuple(map(rename, question.subject)), rename(question.reply))


def _word(name: str, seed: str) -> str:
    """A made-up name in the case of `name`; constants keep theirs."""
    if name in _CONSTANTS:
        return name
    number, words = _hash(f"{seed} {name}"), topic_words()
    first, second = words[number % len(words)], words[number // len(words) % len(words)]
    if name[0].isupper():
        return first.capitalize() + second.capitalize()
    return f"{first}_{second}" if "_" in name else first


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
