"""Task files: what a model is asked, and how one knows that it was right. One JSONL format; free of torch.

The first line tells of the task, each other one is an item. What the first line says of `kind` and `check` holds for
all items that say nothing else.

    {"task": "capitals", "ability": "knowledge", "kind": "choice", "form": "text", "shots": 1}
    {"prompt": "The capital of Italy is", "choices": [" Rome", " Lima"], "answer": 0, "example": true}
    {"prompt": "The capital of Peru is", "choices": [" Rome", " Lima"], "answer": 1}

Kinds: `choice` is judged by the likelihood of its choices, `generate` by a check of what the model writes, `code` by
running it. Examples are shown in front of an item (`shots` of them) and are never asked.

Rejected: YAML with templates, as lm-eval has (a second language to debug), and one file for each item's kind.
"""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.settings import Settings
from ingot.evaluate.checks import CHECKS, COUNTS

SUITE = Path(str(files("ingot.evaluate"))) / "suite"
"""Tasks that come with the package, by the name of their file."""
SUFFIX = ".jsonl"


class Head(Settings):
    """The first line of a task file."""

    task: str
    """Its name, in tables."""
    ability: str = ""
    """What it is about, in words."""
    kind: Literal["choice", "generate", "code"] = "generate"
    """How items are judged."""
    form: Literal["text", "question"] = "text"
    """`text`: every model goes on from the prompt. `question`: a model trained on conversations is asked it."""
    shots: int = Field(default=0, ge=0)
    """Examples shown in front of an item."""
    between: str = "\n\n"
    """What stands between an example and what follows it."""
    max_new: int = Field(default=64, ge=1)
    """Longest answer in tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends an answer and is cut off; of running text, for a model that is asked has ends of its own."""
    check: str | dict[str, Any] = "exact"
    """How an answer is judged; see `checks.py`."""


class Item(Settings):
    """One question."""

    prompt: str
    """What is asked, or gone on from; usually without a blank at its end."""
    kind: Literal["choice", "generate", "code"]
    """How it is judged."""
    choices: tuple[str, ...] = ()
    """Of kind `choice`: the answers to choose from, each with the blank it begins with."""
    answer: int | None = None
    """The number of the right choice, from 0."""
    targets: tuple[str, ...] = ()
    """Right answers; the first is shown in examples, and its likelihood is measured."""
    check: str | dict[str, Any]
    """A check's name, for any of the targets; or a table of checks with their arguments, of which all must hold."""
    tests: str = ""
    """Of kind `code`: statements that fail unless the code is right."""
    example: bool = False
    """Whether it is shown in front of others instead of being asked."""

    @property
    def reference(self) -> str:
        """A right answer, as an example shows it."""
        return self.choices[self.answer or 0] if self.kind == "choice" else self.targets[0] if self.targets else ""

    @model_validator(mode="after")
    def _whole(self) -> "Item":
        if self.kind == "choice":
            if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices):
                raise ValueError(f"found choices {list(self.choices)}, expected at least two different ones")
            if self.answer is None or not 0 <= self.answer < len(self.choices):
                raise ValueError(f"found answer {self.answer}, expected the number of a choice from 0")
            if not all(map(str.strip, self.choices)):
                raise ValueError("found an empty choice, expected text")
            return self
        if not all(map(str.strip, self.targets)):
            raise ValueError("found an empty target, expected text")
        if self.kind == "code":
            if not self.tests.strip():
                raise ValueError("found no tests, expected statements that fail unless the code is right")
            compile(self.tests, "tests", "exec")
            return self
        names = [self.check] if isinstance(self.check, str) else list(self.check)
        for name in names:
            if name not in CHECKS:
                raise ValueError(f"found check '{name}'; {nearest(name, CHECKS)}")
        asked = [(self.check, t) for t in self.targets] if isinstance(self.check, str) else self.check.items()
        for name, wanted in asked:
            if name in COUNTS and type(wanted) is not int:
                raise ValueError(f"found {wanted!r} for check '{name}', expected a number, as in {{\"{name}\": 3}}")
            try:
                CHECKS[name]("0", wanted)
            except (re.error, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"found {wanted!r} for check '{name}', expected what it takes ({error})") from None
        if isinstance(self.check, str) and not self.targets:
            raise ValueError(f"found check '{self.check}' without targets, expected what an answer is compared with")
        if not names:
            raise ValueError("found a check that asks nothing, expected at least one")
        return self


class Task(Settings):
    """A task file that was read."""

    head: Head
    items: tuple[Item, ...]
    """What is asked, in the file's order."""
    examples: tuple[Item, ...]
    """What is shown in front, in the file's order."""

    def shown(self, shots: int | None = None) -> list[Item]:
        """The examples in front of every item; a number of shots other than the task's own may be given."""
        return list(self.examples[: self.head.shots if shots is None else shots])


def task_file(name: str) -> Path:
    """The file behind a task's name, or behind a path that ends in .jsonl.

    Raises:
        UserError: there is none.
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
    """Read a task.

    Raises:
        UserError: no such task, or a line that is not as it should be, by its number.
    """
    path = task_file(name)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the task as UTF-8") from None
    tables = [(n, _table(path, n, line)) for n, line in enumerate(lines, 1) if line.strip()]
    if not tables or "task" not in tables[0][1]:
        raise UserError(f'{path}: found no first line {{"task": "NAME", ...}}, expected one that names the task')
    head = _read(Head, path, *tables[0])
    defaults = {"kind": head.kind, "check": head.check}
    items = [_read(Item, path, n, {**defaults, **table}) for n, table in tables[1:]]
    asked = tuple(item for item in items if not item.example)
    examples = tuple(item for item in items if item.example)
    if not asked:
        raise UserError(f"{path}: found no item that is asked, expected at least one line without example = true")
    if len(examples) < head.shots:
        raise UserError(f"{path}: found {len(examples)} examples for {head.shots} shots; mark more items as examples")
    if bare := next((e.prompt for e in examples if not e.reference), None):
        raise UserError(f"{path}: the example {bare[:40]!r} has no targets, so there is nothing to show; add a target")
    return Task(head=head, items=asked, examples=examples)


def _table(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        table = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not JSON ({error}); every line is one JSON object") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}, line {number}: found {type(table).__name__}, expected a JSON object")
    return table


def _read(model: type[Any], path: Path, number: int, table: Mapping[str, Any]) -> Any:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            what = f"unknown field '{name}'; {nearest(name, model.model_fields)}"
        elif first["type"] == "value_error":
            what = first["msg"].removeprefix("Value error, ")
        else:
            what = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise UserError(f"{path}, line {number}: {what}") from None
    except SyntaxError as error:
        raise UserError(f"{path}, line {number}: tests are not Python ({error.msg}); mend them") from None
