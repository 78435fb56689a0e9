"""Renders Jinja chat templates of model directories, with the spans of the answers to train on.

A rendered template is a string, in which a special token of the template looks like one that a user typed. Random
strings keep them apart. Before rendering, each special token in a message is replaced by a random alias; the rest of
the message stays visible to the template's conditions and filters. After rendering, the template's own special tokens
become the placeholders of `Tokenizer.encode_with_specials`, and the aliases become text again. The ids equal those of
`transformers` for messages without special tokens; in messages, special tokens stay text.

The answers are the template's `{% generation %}` blocks. Without such blocks, the text up to an answer must be a prefix
of the text with the answer, and both must be prefixes of the complete text; the answer is the difference. A template
that rewrites earlier turns violates this and is an error, because its mask would be wrong.

Answers are not searched in the rendered text, because a short one can occur anywhere. `strftime_now` is undefined so
that ids do not change with the date; templates that test for it use their own date.
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
"""Delimiters of a target span in the rendered text."""


@dataclass(frozen=True)
class RenderedText:
    """A rendered conversation in which placeholders represent the special tokens."""

    text: str
    target_spans: list[tuple[int, int]]
    """(start, end exclusive) in characters of each part that is trained on."""


class Template:
    """A compiled template.

    Args:
        source: the Jinja source.
        special_tokens_map: variables of the template: `eos_token` and so on.
        placeholders: special token -> the random string that represents it.
        ends: special tokens that end an answer.

    Raises:
        UserError: invalid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens_map: Mapping[str, str],
        placeholders: Mapping[str, str],
        ends: frozenset[str],
    ):
        self._special_tokens_map, self._placeholders, self._ends = dict(special_tokens_map), dict(placeholders), ends
        names = sorted(placeholders, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._max_length = max(map(len, names), default=0)
        self._prefixes = {name[:n] for name in names for n in range(1, len(name))}
        self._suffixes = {name[n:] for name in names for n in range(1, len(name))}
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _reject, "namespace": _Namespace, "dict": _dict}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}; fix the template") from None
        self.has_generation_blocks = environment.has_generation_blocks

    def render(
        self, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool], generation_prompt: bool = False
    ) -> RenderedText:
        """Render one conversation.

        Args:
            messages: tables with `role` and `content`.
            trained: whether to train on each message.
            generation_prompt: end with the header of an answer.

        Raises:
            UserError: the template rejects the conversation, or does not show where an answer begins and ends.
        """
        hidden: list[str] = []
        aliased = [{"role": m["role"], "content": self._hide(m["content"], hidden)} for m in messages]
        text = self._run(aliased, generation_prompt)
        if not any(trained):
            text = text.replace(OPEN, "").replace(CLOSE, "")
        elif self.has_generation_blocks:
            text = self._delimit_blocks(text, messages, trained)
        else:
            text = self._delimit_by_prefixes(text, aliased, trained)
        return self._resolve(text, hidden)

    def _run(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        context = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": None, "documents": None}
        try:
            return self._template.render(**self._special_tokens_map, **context)
        except _Rejection as error:
            raise UserError(f"chat template rejects this conversation: {error}; change the conversation") from None
        except jinja2.TemplateError as error:
            why = " (ids would change with the date)" if "strftime_now" in str(error) else ""
            raise UserError(f"chat template: {error}{why}; fix the template") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"chat template: {type(error).__name__}: {error}; fix the template") from None

    def _hide(self, content: str, hidden: list[str]) -> str:
        """Replace special tokens in the content by aliases, and ends that could become part of a special token.

        Args:
            content: the content of a message.
            hidden: the replaced strings so far; the alias of each contains its index.
        """

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
        """Lengths of the longest start of `text` that can end a special token, and of the end that can start one."""
        head = max((n for n in range(1, self._max_length) if text[:n] in self._suffixes), default=0)
        tail = max((n for n in range(1, self._max_length) if text[-n:] in self._prefixes), default=0)
        return head, tail

    def _delimit_blocks(self, text: str, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> str:
        """Delimit the generation blocks of the messages to train on, each with the end of its turn."""
        parts = re.split(f"{OPEN}|{CLOSE}", text)  # alternately outside and inside of a block
        answers = [t for m, t in zip(messages, trained, strict=True) if m["role"] == "assistant"]
        blocks = len(parts) // 2
        if blocks != len(answers) and not all(answers):
            raise UserError(
                f"chat template: found {blocks} generation block(s) for {len(answers)} answers, so train = false of "
                "one message cannot be applied; train on all of them or use another template"
            )
        is_target = answers if blocks == len(answers) else [True] * blocks
        for n, target in enumerate(is_target):
            end = self._special.match(parts[2 * n + 2])
            if end and end[0] in self._ends:  # if a block omits the end of turn, the model would not learn to stop
                parts[2 * n + 1] += end[0]
                parts[2 * n + 2] = parts[2 * n + 2][end.end() :]
            if target:
                parts[2 * n + 1] = OPEN + parts[2 * n + 1] + CLOSE
        return "".join(parts)

    def _delimit_by_prefixes(self, text: str, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> str:
        """Delimit each answer to train on, from the end of its prompt to the end of its turn."""
        spans = []
        for n, target in enumerate(trained):
            if not target:
                continue
            before, after = self._run(messages[:n], True), self._run(messages[: n + 1], False)
            for prefix, what in ((before, "up to"), (after, "with")):
                if not (text.startswith(prefix) and after.startswith(before)):
                    raise UserError(
                        f"chat template: the text {what} message {n + 1} is not a prefix of the text of all "
                        f"{len(messages)}, so the answer cannot be located; set train = false on that message, end the "
                        "conversation with it, or use a template with {% generation %} blocks"
                    )
            ends = list(self._special.finditer(after, len(before)))
            stop = ends[-1].end() if ends and not after[ends[-1].end() :].strip() else len(after)
            spans.append((len(before), stop))
        for start, stop in reversed(spans):
            text = text[:start] + OPEN + text[start:stop] + CLOSE + text[stop:]
        return text

    def _resolve(self, text: str, hidden: Sequence[str]) -> RenderedText:
        """Replace aliases by text, special tokens by placeholders and delimiters by spans, in one pass."""
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        at = length = start = 0

        def add(text: str) -> None:
            nonlocal length
            pieces.append(text)
            length += len(text)

        for match in re.finditer(rf"{OPEN}|{CLOSE}|{_SECRET}(?P<number>\d+)\.|{self._special.pattern}", text):
            add(text[at : match.start()])
            at = match.end()
            if match[0] == OPEN:
                start = length
            elif match[0] == CLOSE:
                spans.append((start, length))
            else:
                add(hidden[int(match["number"])] if match["number"] else self._placeholders[match[0]])
        add(text[at:])
        return RenderedText("".join(pieces), spans)


@functools.lru_cache(maxsize=16)
def _cached_template(
    source: str, special_tokens_map: tuple[Any, ...], placeholders: tuple[Any, ...], ends: frozenset[str]
) -> Template:
    return Template(source, dict(special_tokens_map), dict(placeholders), ends)


def compile_template(
    source: str, special_tokens_map: Mapping[str, str], placeholders: Mapping[str, str], ends: frozenset[str]
) -> Template:
    """A cached `Template` of the same arguments."""
    items = (tuple(sorted(mapping.items())) for mapping in (special_tokens_map, placeholders))
    return _cached_template(source, *items, ends)


class _Sandbox(ImmutableSandboxedEnvironment):
    has_generation_blocks = False


class _Generation(Extension):
    """Jinja extension for `{% generation %} ... {% endgeneration %}` around an answer."""

    tags = {"generation"}  # noqa: RUF012 (the form that Jinja requires)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation_blocks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_delimit"), [], [], body).set_lineno(line)

    def _delimit(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


class _Rejection(Exception):
    """Raised by a template's call of `raise_exception`."""


def _reject(message: str) -> None:
    raise _Rejection(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's built-in filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _dict(*arguments: Any, **items: Any) -> dict[Any, Any]:
    return dict(*arguments, **items)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without private names, because Jinja's sandbox does not protect names such as `__class__` in one."""

    def __init__(*args: Any, **items: Any) -> None:  # Jinja's signature, so that `namespace(self=...)` works
        self, *positional = args
        attributes = dict(*positional, **items)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} may not be set")
