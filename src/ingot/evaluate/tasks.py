"""Task files: prompts for a model, and how to evaluate its answers. One JSONL format; no torch.

The first line describes the task, and each further line is an item. `kind` and `check` of the first line are the
defaults of all items.

    {"task": "capitals", "ability": "knowledge", "kind": "choice", "form": "text", "shots": 1}
    {"prompt": "The capital of Italy is", "choices": [" Rome", " Lima"], "answer": 0, "example": true}
    {"prompt": "The capital of Peru is", "choices": [" Rome", " Lima"], "answer": 1}

Kinds: `choice` is evaluated by the likelihood of its choices, `generate` by a check of the generated answer, `code` by
running it. Examples only precede items as few-shot examples (`shots` of them); they are not evaluated.
"""

import builtins
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.settings import Settings
from ingot.core.validation import problems
from ingot.evaluate.checks import CHECKS, COUNTS

SUITE = Path(str(files("ingot.evaluate"))) / "suite"
"""The tasks of the package; a file's name is the task's name."""
SUFFIX = ".jsonl"


class TaskHeader(Settings):
    """The first line of a task file."""

    task: str
    """Its name in tables."""
    ability: str = ""
    """A description of the ability that it measures."""
    kind: Literal["choice", "generate", "code"] = "generate"
    """How items are evaluated."""
    form: Literal["text", "question"] = "text"
    """`text`: every model continues the prompt. `question`: models trained on conversations get it as a message."""
    shots: int = Field(default=0, ge=0)
    """Few-shot examples before each item."""
    between: str = "\n\n"
    """Separator after each example."""
    max_new: int = Field(default=64, ge=1)
    """Longest answer in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a generated answer and are cut off; unused in conversations, where the end of turn ends it."""
    check: str | dict[str, Any] = "exact"
    """How generated answers are evaluated; see `checks.py`."""


class Item(Settings):
    """One prompt with its correct answers."""

    prompt: str
    """The text to answer or to continue, without a blank at its end."""
    system: str = ""
    """A system message before the prompt; models that continue text get it as text, with an empty line after it."""
    kind: Literal["choice", "generate", "code"]
    """How it is evaluated."""
    choices: tuple[str, ...] = ()
    """For kind `choice`: the possible answers, each with its leading space."""
    answer: int | None = None
    """For kind `choice`: the number of the correct choice, from 0."""
    targets: tuple[str, ...] = ()
    """Correct answers. Examples show the first one, and its likelihood is measured."""
    check: str | dict[str, Any]
    """A check, which must pass with any target; or a table of checks with their arguments, which must all pass."""
    tests: str = ""
    """For kind `code`: statements that fail unless the code is correct. They run outside of the code's process."""
    example: bool = False
    """Whether it is a few-shot example instead of being evaluated."""

    @property
    def reference(self) -> str:
        """A correct answer, as an example shows it; empty if there is none."""
        return self.choices[self.answer or 0] if self.kind == "choice" else self.targets[0] if self.targets else ""

    @model_validator(mode="after")
    def _valid(self) -> "Item":
        if self.prompt[-1:].isspace() and not self.prompt.endswith("\n"):  # a word's token begins with its blank
            raise ValueError(f"found the prompt {self.prompt[-40:]!r}, expected no blank at its end; leave it out")
        if self.kind == "choice":
            if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices):
                raise ValueError(f"found choices {list(self.choices)}, expected at least two different ones")
            if self.answer is None or not 0 <= self.answer < len(self.choices):
                raise ValueError(f"found answer {self.answer}, expected the number of a choice from 0")
            if not all(map(str.strip, self.choices)):
                raise ValueError("found an empty choice, expected text")
            if joined := next((c for c in self.choices if _is_word(self.prompt[-1:], ".,:;?!") and _is_word(c[0])), ""):
                raise ValueError(f"found the choice {joined!r} after {self.prompt[-10:]!r}, expected its leading space")
            return self
        if not all(map(str.strip, self.targets)):
            raise ValueError("found an empty target, expected text")
        if self.kind == "code":
            if not self.tests.strip():
                raise ValueError("found no tests, expected statements that fail unless the code is right")
            compile(self.tests, "tests", "exec")
            defined = re.findall(r"^(?:async )?(?:def|class) (\w+)", self.prompt, re.MULTILINE)
            if taken := next((name for name in defined if hasattr(builtins, name)), None):
                raise ValueError(f"found a definition of '{taken}', a builtin that tests may use; choose another name")
            return self
        names = [self.check] if isinstance(self.check, str) else list(self.check)
        for name in names:
            if name not in CHECKS:
                raise ValueError(f"found check '{name}'; {nearest(name, CHECKS)}")
        arguments = [(self.check, t) for t in self.targets] if isinstance(self.check, str) else self.check.items()
        for name, argument in arguments:
            if name in COUNTS and type(argument) is not int:
                raise ValueError(f"found {argument!r} for check '{name}', expected a number, as in {{\"{name}\": 3}}")
            try:
                CHECKS[name]("0", argument)
            except (re.error, TypeError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"found {argument!r} for check '{name}', expected a valid argument ({error})"
                ) from None
        if isinstance(self.check, str) and not self.targets:
            raise ValueError(f"found check '{self.check}' without targets, expected at least one correct answer")
        if not names:
            raise ValueError("found an empty check, expected at least one rule")
        return self


def _is_word(character: str, more: str = "") -> bool:
    """Whether a character is a digit, of an alphabet with cases, whose words have spaces between them, or in `more`."""
    return character.islower() or character.isupper() or character.isdigit() or (character != "" and character in more)


class Task(Settings):
    """A parsed task file."""

    head: TaskHeader
    items: tuple[Item, ...]
    """Items to evaluate, in the file's order."""
    examples: tuple[Item, ...]
    """Few-shot examples, in the file's order."""

    def few_shot_examples(self, shots: int | None = None) -> list[Item]:
        """The examples before every item; `shots` replaces the task's own number."""
        return list(self.examples[: self.head.shots if shots is None else shots])


def task_file(name: str) -> Path:
    """The path of a task, given the name of a packaged task or a path that ends in .jsonl.

    Raises:
        UserError: the file does not exist.
    """
    if name.endswith(SUFFIX):
        path = Path(name).expanduser()
        if not path.is_file():
            raise MissingFile(f"tasks: '{name}' does not exist (looked from {Path.cwd()}); check the path")
        return path
    if not (path := SUITE / f"{name}{SUFFIX}").is_file():
        known = sorted(p.stem for p in SUITE.glob(f"*{SUFFIX}"))
        raise UserError(f"tasks: no task '{name}'; {nearest(name, known)}; a file of your own ends in {SUFFIX}")
    return path


def load_task(name: str) -> Task:
    """Read a task by its name or path.

    Raises:
        UserError: there is no such task, or a line is invalid; the message has its number.
    """
    path = task_file(name)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the task as UTF-8") from None
    tables = [(n, _table(path, n, line)) for n, line in enumerate(lines, 1) if line.strip()]
    if not tables or "task" not in tables[0][1]:
        raise UserError(f'{path}: found no first line {{"task": "NAME", ...}}, expected one that names the task')
    head = _validate(TaskHeader, path, *tables[0])
    defaults = {"kind": head.kind, "check": head.check}
    entries = [_validate(Item, path, n, {**defaults, **table}) for n, table in tables[1:]]
    items = tuple(item for item in entries if not item.example)
    examples = tuple(item for item in entries if item.example)
    if not items:
        raise UserError(f"{path}: found only examples, expected at least one line without example = true")
    if len(examples) < head.shots:
        raise UserError(f"{path}: found {len(examples)} examples for {head.shots} shots; mark more items as examples")
    if bare := next((e.prompt for e in examples if not e.reference), None):
        raise UserError(f"{path}: the example {bare[:40]!r} has no targets, so there is nothing to show; add a target")
    return Task(head=head, items=items, examples=examples)


def _table(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        table = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON ({error}); every line is one JSON object") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}, line {number}: found {type(table).__name__}, expected a JSON object")
    return table


def _validate(model: type[Any], path: Path, number: int, table: Mapping[str, Any]) -> Any:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}, line {number}: {problems(model, error, noun='field')[0]}") from None
    except SyntaxError as error:
        raise UserError(f"{path}, line {number}: tests are not Python ({error.msg}); fix them") from None
