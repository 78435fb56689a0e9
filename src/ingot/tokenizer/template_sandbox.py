"""The sandboxed Jinja environment of chat templates: what a template may use, and how much work it may do.

A template is foreign code. Its work is counted and not timed, so a conversation is refused on every machine or on none:

    steps        loop iterations, calls, filters and operators, plus one for each element and for each 256 characters
                 that they read or make; at most `MAX_STEPS`, `STEPS_PER_MESSAGE` for each message and one for each
                 character of the conversation
    characters   of any value and of the output; at most `MAX_CHARACTERS`, and 10 times the conversation

Operators and methods that can multiply a text (`*`, `%`, `replace`, `join`, `format`) are checked before they run.
Nothing depends on the clock or on chance: `strftime_now` is the caller's, and `lipsum` and `random` are removed.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from ingot.core.errors import UserError

MAX_STEPS, STEPS_PER_MESSAGE = 1_000_000, 10_000
MAX_CHARACTERS = 1_000_000
_MAX_BITS = 4096
"""Longest integer in bits."""
_CONSTANT_TIME = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""Filters that do not read all of their input."""
_MULTIPLYING = frozenset({"%", "expandtabs", "format", "format_map", "indent", "join", "replace", "translate"})
"""Functions whose result can be much longer than their arguments and the widths among them."""
_COMPARISONS = (
    "in",
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "greaterthan",
    "ge",
    ">=",
)
"""Tests that compare values."""
_NUMBER = re.compile(r"\d+")


class ConversationRefused(UserError):
    """The template cannot render a conversation, or not so that its answers can be located."""


class TemplateLimit(ConversationRefused):
    """The template does more work for one conversation than a template needs."""


class Rejected(ConversationRefused):
    """The template calls `raise_exception`."""


class Work:
    """The work that is left to one rendering.

    Args:
        messages: number of messages of the conversation.
        characters: number of their characters.
    """

    def __init__(self, messages: int = 0, characters: int = 0):
        self._max_steps = self._steps = MAX_STEPS + STEPS_PER_MESSAGE * messages + characters
        self._max_characters = MAX_CHARACTERS + 10 * characters

    def spend(self, steps: int) -> None:
        """Count steps. Raises TemplateLimit if none is left."""
        self._steps -= steps
        if self._steps < 0:
            raise TemplateLimit(
                f"chat template: more than {self._max_steps:,} steps for one conversation; shorten the template's loops"
            )

    def check(self, characters: int) -> None:
        """Raise TemplateLimit for a value of so many characters or elements."""
        if characters > self._max_characters:
            raise TemplateLimit(
                f"chat template: a value of more than {self._max_characters:,} characters for one conversation; fix "
                "the template"
            )

    def read(self, values: Iterable[Any]) -> int:
        """Count the steps of reading values with all that is nested in them. Returns their characters and elements."""
        characters = elements = 0
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, dict):
                elements += len(value)
                waiting += [*value, *value.values()]
            elif isinstance(value, list | tuple | set | range):
                elements += len(value)
                waiting += () if isinstance(value, range) else value
            self.check(characters + elements)
        self.spend(1 + elements + characters // 256)
        return characters + elements

    def made(self, value: Any) -> Any:
        """The value, after a check of its size."""
        if isinstance(value, str | list | tuple | dict):
            self.check(len(value))
            self.spend(len(value) // 256 if isinstance(value, str) else len(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TemplateLimit(f"chat template: an integer of more than {_MAX_BITS:,} bits; fix the template")
        return value


_work: ContextVar[Work] = ContextVar("work")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template.

    Args:
        block: the strings that enclose the text of a `{% generation %}` block in the output.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    has_generation_blocks = False

    def __init__(self, block: tuple[str, str]):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_checked_output
        )
        self.block = block
        own = {"tojson": _tojson, "iterated": _iterated, "read": _read, "read_all": _read_all}
        own["concatenated"] = _concatenated
        self.filters = {n: _metered(n, f) for n, f in (self.filters | own).items() if n != "random"}
        self.tests |= {name: _metered(name, self.tests[name]) for name in _COMPARISONS}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _reject, "namespace": _Namespace, "dict": _dict}

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template whose loops, concatenations, slices and searches are counted.

        Raises:
            jinja2.TemplateSyntaxError: invalid Jinja.
        """
        tree = self.parse(source)
        kinds = (nodes.For, nodes.Concat, nodes.Getitem, nodes.Compare, nodes.Operand, nodes.Pair)
        for node in list(tree.find_all(kinds)):
            if isinstance(node, nodes.For):
                node.iter = _filter(node.iter, "iterated")
            elif isinstance(node, nodes.Concat):
                node.nodes = [_filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")]
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                node.node = _filter(node.node, "read")
            elif isinstance(node, nodes.Getitem):
                node.arg = _compared(node.arg)
            elif isinstance(node, nodes.Compare | nodes.Operand):
                node.expr = _compared(node.expr)
            elif isinstance(node, nodes.Pair):
                node.key = _compared(node.key)
        tree.set_environment(self)
        token = _work.set(Work())  # Jinja evaluates constants when it compiles
        try:
            return self.from_string(tree)
        finally:
            _work.reset(token)

    def render(self, template: jinja2.Template, work: Work, context: dict[str, Any]) -> str:
        """The output of a template.

        Raises:
            Rejected: the template calls `raise_exception`.
            TemplateLimit: it does more than `work`.
            Exception: whatever else its code raises.
        """
        token = _work.set(work)
        try:
            return template.render(**context)
        finally:
            _work.reset(token)

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The text of the output or of a block in it; replaces the function that Jinja calls."""
        work, pieces, length = _work.get(), list[str](), 0
        for part in parts:
            pieces.append(part)
            length += len(part)
            work.check(length)
        work.spend(1 + length // 256)
        return "".join(pieces)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro. The body of a macro counts its own steps."""
        work = _work.get()
        if isinstance(obj, Macro):
            work.spend(1)
        else:
            method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
            text = getattr(method, "__self__", None)
            read = [text] if isinstance(text, str) else []
            _check_growth(work, getattr(method, "__name__", ""), [*read, *args, *kwargs.values()])
        return work.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator."""
        work = _work.get()
        sized = str | list | tuple
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            work.check(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(times, int):
                    work.check(len(value) * times)
        elif operator == "%" and isinstance(left, str):
            _check_growth(work, "%", [left, *(right if isinstance(right, tuple) else [right])])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            work.made(1 << min(_MAX_BITS, max(0, left.bit_length() * right)))
        work.spend(1)
        return work.made(super().call_binop(context, operator, left, right))


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _compared(node: Any) -> Any:
    """A value that is compared or hashed: lists that repeat each other take time without end."""
    return node if isinstance(node, nodes.Const) else _filter(node, "read_all")


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its work counted."""
    if function in (_iterated, _read, _read_all, _concatenated):
        return function

    @functools.wraps(function)  # also copies Jinja's marks of the first argument
    def metered(*args: Any, **kwargs: Any) -> Any:
        work = _work.get()
        if name in _CONSTANT_TIME:
            work.spend(1)
        else:
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            _check_growth(work, name, [*values, *kwargs.values()])
        return work.made(function(*args, **kwargs))

    return metered


def _iterated(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop, counted."""
    work = _work.get()
    for value in values:
        work.spend(1)
        yield value


def _read(value: Any) -> Any:
    """A value that a slice reads."""
    length = len(value) if isinstance(value, str | list | tuple | dict) else 0
    _work.get().spend(1 + (length // 256 if isinstance(value, str) else length))
    return value


def _read_all(value: Any) -> Any:
    """A value that is read with all that is nested in it."""
    if isinstance(value, str | list | tuple | dict):
        _work.get().read([value])
    return value


def _concatenated(values: Sequence[Any]) -> str:
    """The operator `~`."""
    _work.get().read(values)
    return "".join(map(str, values))


def _checked_output(value: Any) -> Any:
    """A value that is written; lists can repeat each other, so that their text is longer than they are."""
    if isinstance(value, list | tuple | dict):
        _work.get().read([value])
    return value


def _check_growth(work: Work, name: str, values: Sequence[Any]) -> None:
    """Count the reading of a function's arguments, and refuse a result that would be too long.

    Args:
        work: the work that is left.
        name: the function.
        values: its arguments; of a method the text comes first.
    """
    size = work.read(values)
    for value in values:
        if isinstance(value, int):
            work.check(abs(value))  # a width or a count
    if name not in _MULTIPLYING:
        return
    first, rest = (values[0], values[1:]) if values else (None, [])
    if name == "join" and rest:  # the method's separator comes first, the filter's last
        separator, parts = (first, rest[0]) if isinstance(first, str) else (rest[0], first)
        count = len(parts) if isinstance(parts, list | tuple | dict | str) else MAX_RANGE
        work.check(size + count * (len(separator) if isinstance(separator, str) else 0))
    if not isinstance(first, str):
        return
    numbers = sum(value for value in rest if isinstance(value, int))
    if name == "replace" and len(rest) >= 2 and isinstance(rest[0], str) and isinstance(rest[1], str):
        work.check(len(first) + first.count(rest[0]) * len(rest[1]))
    elif name in ("format", "format_map", "%"):
        widths = sum(int(digits[:9]) for digits in _NUMBER.findall(first))
        work.check(len(first) + widths + (first.count("%") + first.count("{")) * size)
    elif name in ("expandtabs", "indent"):
        work.check(len(first) + (1 + first.count("\t" if name == "expandtabs" else "\n")) * max(8, numbers))
    elif name == "translate":
        work.check(len(first) * size)


class _Generation(Extension):
    """Jinja extension for `{% generation %} ... {% endgeneration %}` around an answer."""

    tags = {"generation"}  # noqa: RUF012 (the form that Jinja requires)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation_blocks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_delimit"), [], [], body).set_lineno(line)

    def _delimit(self, caller: Any) -> str:
        before, after = self.environment.block  # type: ignore[attr-defined]
        return before + caller() + after


def _reject(message: str) -> None:
    raise Rejected(f"chat template rejects this conversation: {message}; change the conversation")


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
