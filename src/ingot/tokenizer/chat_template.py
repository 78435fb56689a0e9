"""Chat templates in Jinja, as model directories carry them: a conversation to marked text, with what is learned in it.

A template sees a string, so it cannot tell its own `<|im_end|>` from one that a user typed. Two kinds of names that
nobody can guess (drawn at random when a tokenizer is loaded; they never reach the ids) keep them apart. Before a
template runs, special tokens in contents are replaced by such names, which templates copy like any word; cutting,
trimming and conditions see the true content otherwise, which they would not if whole contents were hidden. Afterwards
the special tokens that the template itself wrote become the names that `Tokenizer.encode_marked` takes for tokens, and
those of the contents become text again. So the ids are those of `transformers` where contents hold no special token,
and where they do, it stays text.

What is learned comes from the template's `{% generation %}` blocks. Without them, what it renders up to an answer must
be the start of what it renders with the answer, and that of the whole: the answer is what lies between. A template that
rewrites earlier turns when later ones come fails this, and is an error rather than a mask that is slightly off.

Rejected: finding answers in the rendered text (a short one is found anywhere), and `strftime_now` (ids would change
with the day; templates that ask whether it is defined use their own date).
"""

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot.core.errors import UserError

_SECRET = secrets.token_hex(16)
OPEN, CLOSE = f"{_SECRET}o", f"{_SECRET}c"
"""Stand around what is learned."""


@dataclass(frozen=True)
class Marked:
    """Text in which special tokens have their unguessable names, and the parts of it that are learned."""

    text: str
    learned: list[tuple[int, int]]
    """First character and last + 1 of each part."""


class Template:
    """A compiled template.

    Args:
        source: Jinja.
        names: what special tokens are for; the template sees them as `eos_token` and so on.
        marks: special token -> the unguessable name that stands for it.
        ends: special tokens that end an answer.

    Raises:
        UserError: not valid Jinja.
    """

    def __init__(self, source: str, names: Mapping[str, str], marks: Mapping[str, str], ends: frozenset[str]):
        self._names, self._marks, self._ends = dict(names), dict(marks), ends
        self._special = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        self._longest = max(map(len, marks), default=0)
        self._cuts = {s[:n] for s in marks for n in range(1, len(s))}, {s[n:] for s in marks for n in range(1, len(s))}
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "namespace": _Namespace, "dict": _dict}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}; mend the template") from None
        self.marks_answers = environment.marks_answers

    def render(
        self, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool], generation_prompt: bool = False
    ) -> Marked:
        """One conversation.

        Args:
            messages: tables with `role` and `content`.
            trained: for each message whether it is to be learned.
            generation_prompt: end with the beginning of an answer.

        Raises:
            UserError: the template refuses the conversation, or does not show where an answer begins and ends.
        """
        hidden: list[str] = []
        plain = [{"role": m["role"], "content": self._hide(m["content"], hidden)} for m in messages]
        whole = self._run(plain, generation_prompt)
        if not any(trained):
            whole = whole.replace(OPEN, "").replace(CLOSE, "")
        elif self.marks_answers:
            whole = self._chosen(whole, messages, trained)
        else:
            whole = self._by_prefixes(whole, plain, trained)
        return self._marked(whole, hidden)

    def _run(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        context = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": None, "documents": None}
        try:
            return self._template.render(**self._names, **context)
        except _Refusal as error:
            raise UserError(f"chat template: it refuses this conversation: {error}; change the conversation") from None
        except jinja2.TemplateError as error:
            why = " (ids would change with the day)" if "strftime_now" in str(error) else ""
            raise UserError(f"chat template: {error}{why}; mend the template") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"chat template: {type(error).__name__}: {error}; mend the template") from None

    def _hide(self, content: str, hidden: list[str]) -> str:
        """The content with its special tokens, and what its ends could become part of one, under other names."""

        def replace(text: str) -> str:
            hidden.append(text)
            return f"{_SECRET}{len(hidden) - 1}."

        content = self._special.sub(lambda match: replace(match[0]), content)
        core = content.strip()
        head, tail = self._overlaps(core)
        if not head and not tail:
            return content
        before, after = content[: content.index(core)], content[content.index(core) + len(core) :]
        if head + tail >= len(core):
            return before + replace(core) + after
        first = replace(core[:head]) if head else ""
        last = replace(core[len(core) - tail :]) if tail else ""
        return before + first + core[head : len(core) - tail] + last + after

    def _overlaps(self, text: str) -> tuple[int, int]:
        """Lengths of the start of `text` that ends a special token, and of its end that starts one."""
        head = max((n for n in range(1, self._longest) if text[:n] in self._cuts[1]), default=0)
        tail = max((n for n in range(1, self._longest) if text[-n:] in self._cuts[0]), default=0)
        return head, tail

    def _chosen(self, whole: str, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> str:
        """Leave the marks of those answers that are to be learned, and let each reach its end of turn."""
        parts = re.split(f"{OPEN}|{CLOSE}", whole)  # outside and inside of the blocks in turn
        answers = [t for m, t in zip(messages, trained, strict=True) if m["role"] == "assistant"]
        blocks = len(parts) // 2
        if blocks != len(answers) and not all(answers):
            raise UserError(
                f"chat template: it marks {blocks} answers of {len(answers)}, so train = false of one message cannot "
                "be followed; train on all of them or take another template"
            )
        kept = answers if blocks == len(answers) else [True] * blocks
        for n, keep in enumerate(kept):
            end = self._special.match(parts[2 * n + 2])
            if end and end[0] in self._ends:  # some templates leave out what ends the turn: nobody would learn to stop
                parts[2 * n + 1] += end[0]
                parts[2 * n + 2] = parts[2 * n + 2][end.end() :]
            if keep:
                parts[2 * n + 1] = OPEN + parts[2 * n + 1] + CLOSE
        return "".join(parts)

    def _by_prefixes(self, whole: str, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> str:
        borders = []
        for n, learned in enumerate(trained):
            if not learned:
                continue
            before, after = self._run(messages[:n], True), self._run(messages[: n + 1], False)
            for part, what in ((before, "up to"), (after, "with")):
                if not (whole.startswith(part) and after.startswith(before)):
                    raise UserError(
                        f"chat template: what it writes {what} message {n + 1} is not the start of what it writes for "
                        f"all {len(messages)}, so it does not show which part is the answer; set train = false on that "
                        "message, end the conversation with it, or take a template with {% generation %} blocks"
                    )
            ends = list(self._special.finditer(after, len(before)))
            stop = ends[-1].end() if ends and not after[ends[-1].end() :].strip() else len(after)
            borders.append((len(before), stop))
        for start, stop in reversed(borders):
            whole = whole[:start] + OPEN + whole[start:stop] + CLOSE + whole[stop:]
        return whole

    def _marked(self, whole: str, hidden: Sequence[str]) -> Marked:
        """Unguessable names to text, special tokens to unguessable names, borders to positions: in one pass."""
        pieces: list[str] = []
        learned: list[tuple[int, int]] = []
        at = length = start = 0

        def add(text: str) -> None:
            nonlocal length
            pieces.append(text)
            length += len(text)

        for match in re.finditer(rf"{OPEN}|{CLOSE}|{_SECRET}(?P<number>\d+)\.|{self._special.pattern}", whole):
            add(whole[at : match.start()])
            at = match.end()
            if match[0] == OPEN:
                start = length
            elif match[0] == CLOSE:
                learned.append((start, length))
            else:
                add(hidden[int(match["number"])] if match["number"] else self._marks[match[0]])
        add(whole[at:])
        return Marked("".join(pieces), learned)


@functools.lru_cache(maxsize=16)
def _compiled(source: str, names: tuple[Any, ...], marks: tuple[Any, ...], ends: frozenset[str]) -> Template:
    return Template(source, dict(names), dict(marks), ends)


def compiled(source: str, names: Mapping[str, str], marks: Mapping[str, str], ends: frozenset[str]) -> Template:
    """The template, compiled once."""
    return _compiled(source, tuple(sorted(names.items())), tuple(sorted(marks.items())), ends)


class _Sandbox(ImmutableSandboxedEnvironment):
    marks_answers = False


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` around what an assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.marks_answers = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


class _Refusal(Exception):
    """A template's own `raise_exception`."""


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _dict(*arguments: Any, **items: Any) -> dict[Any, Any]:
    return dict(*arguments, **items)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that holds nothing of Python's own: the sandbox does not guard names such as `__class__` there."""

    def __init__(*args: Any, **items: Any) -> None:  # like Jinja's, so that `namespace(self=...)` works
        self, *given = args
        attributes = dict(*given, **items)
        for name in attributes:
            _public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} may not be set")
