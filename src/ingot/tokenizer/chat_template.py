"""Renders Jinja chat templates of model directories, with the spans of the answers to train on.

A rendered template is a string, in which a special token of the template looks like one that a user typed. Random
strings keep them apart. Before rendering, each special token in a message is replaced by a random alias; the rest of
the message stays visible to the template's conditions and filters. After rendering, the template's own special tokens
become the placeholders of `Tokenizer.encode_with_specials`, and the aliases become text again. The ids equal those of
`transformers` for messages without special tokens; in messages, special tokens stay text.

The answers are the template's `{% generation %}` blocks. Without such blocks, an answer begins where the generation
prompt ends. Some prompts open a thought (DeepSeek R1's end in `<think>`) that answers without reasoning do not have;
such an answer begins where the two texts part. It ends where the text of the conversation up to it ends, which must be
a prefix of the complete text. A template that rewrites earlier turns violates this and refuses the conversation,
because its mask would be wrong. Answers are not searched in the text, because a short one can occur anywhere.

The reasoning of an answer to train on must be in the text: a template that drops it would teach another answer.
"""

import datetime
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from ingot.core.errors import UserError
from ingot.tokenizer.template_sandbox import ConversationRefused, Sandbox, Work

_SECRET = secrets.token_hex(16)
OPEN, CLOSE = f"{_SECRET}o", f"{_SECRET}c"
"""Delimiters of a target span in the rendered text."""
_MARK = f"{_SECRET}t"
"""Stands for a content, or with a number for reasoning, to find where a template writes it."""
MAX_UNSEEN = 1000
"""Maximum number of sequences of roles whose rendering is remembered."""
_STRFTIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1""")
_THOUGHT = re.compile(r"think|thought|reason|analysis", re.IGNORECASE)


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
        variables: `Tokenizer.template_variables`.

    Raises:
        UserError: invalid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens_map: Mapping[str, str],
        placeholders: Mapping[str, str],
        ends: frozenset[str],
        variables: Mapping[str, Any] | None = None,
    ):
        self._placeholders, self._ends = dict(placeholders), ends
        self._variables = {**special_tokens_map, **_variables(variables or {})}
        names = sorted(placeholders, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._max_length = max(map(len, names), default=0)
        self._prefixes = {name[:n] for name in names for n in range(1, len(name))}
        self._suffixes = {name[n:] for name in names for n in range(1, len(name))}
        self._unseen: dict[tuple[str, ...], int | None] = {}
        self._sandbox = Sandbox((OPEN, CLOSE))
        try:
            self._template = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}; fix the template") from None
        except RecursionError:
            raise UserError("chat template: it is nested too deeply to compile; fix the template") from None
        self.has_generation_blocks = self._sandbox.has_generation_blocks

    def render(
        self, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool], generation_prompt: bool = False
    ) -> RenderedText:
        """Render one conversation.

        Args:
            messages: tables with `role`, `content`, and optionally `reasoning_content`.
            trained: whether to train on each message.
            generation_prompt: end with the header of an answer.

        Raises:
            ConversationRefused: the template rejects the conversation, does not show a message or reasoning to train
                on, or does not show where an answer begins and ends.
        """
        hidden: list[str] = []
        aliased = [self._aliased(message, hidden) for message in messages]
        text = self._run(aliased, generation_prompt)
        self._check_messages(messages)
        self._check_reasoning(aliased, trained)
        if not any(trained):
            text = text.replace(OPEN, "").replace(CLOSE, "")
        elif self.has_generation_blocks:
            text = self._delimit_blocks(text, messages, trained)
        else:
            text = self._delimit_by_prefixes(text, aliased, trained)
        return self._resolve(text, hidden)

    def _check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConversationRefused if the template leaves out the messages of a role, such as the system prompt."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._unseen:
            if len(self._unseen) >= MAX_UNSEEN:
                self._unseen.clear()
            self._unseen[roles] = self._first_unseen(roles)
        n = self._unseen[roles]
        if n is not None and messages[n]["content"].strip():
            raise ConversationRefused(
                f"chat template: the text does not contain message {n + 1} of the {roles[n]}, which would be lost; "
                "remove it, or use a template that shows it"
            )

    def _first_unseen(self, roles: Sequence[str]) -> int | None:
        """Index of the first message other than an answer that the template does not write, or None."""
        marks = [f"{_MARK}{n}x" for n in range(len(roles))]
        try:
            text = self._run([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)], False).lower()
        except ConversationRefused:  # the template expects other contents
            return None
        return next((n for n, mark in enumerate(marks) if roles[n] != "assistant" and mark not in text), None)

    def _check_reasoning(self, messages: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> None:
        """Raise ConversationRefused if the text lacks the reasoning of an answer to train on."""
        marked, marks = list(messages), dict[int, str]()
        for n, message in enumerate(messages):
            if trained[n] and (reasoning := _reasoning(message)):
                marks[n] = f"{_MARK}{n}."
                names = ("reasoning_content", "thinking") if "reasoning_content" in message else ("content",)
                marked[n] = {**message, **{name: message[name].replace(reasoning, marks[n], 1) for name in names}}
        text = self._run(marked, False) if marks else ""
        for n, mark in marks.items():
            if mark not in text:
                raise lost_reasoning(n + 1)

    def _run(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        context = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": None, "documents": None}
        work = Work(len(messages), sum(len(value) for message in messages for value in message.values()))
        try:
            return self._sandbox.render(self._template, work, {**self._variables, **context})
        except ConversationRefused:
            raise
        except jinja2.TemplateError as error:
            hint = "set `date` in the tokenizer stage" if "strftime_now" in str(error) else "fix the template"
            raise ConversationRefused(f"chat template: {error}; {hint}") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ConversationRefused(f"chat template: {type(error).__name__}: {error}; fix the template") from None

    def _aliased(self, message: Mapping[str, Any], hidden: list[str]) -> dict[str, str]:
        """The message as the template gets it; reasoning has two names, as in `transformers`."""
        aliased = {"role": message["role"], "content": self._hide(message["content"], hidden)}
        if not message.get("reasoning_content"):
            return aliased
        reasoning = self._hide(message["reasoning_content"], hidden)
        return {"thinking": reasoning, **aliased, "reasoning_content": reasoning}

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
            raise ConversationRefused(
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
            after = self._run(messages[: n + 1], False) if n + 1 < len(messages) else text
            if not text.startswith(after):
                raise ConversationRefused(
                    f"chat template: the text with message {n + 1} is not a prefix of the text of all {len(messages)}, "
                    'so the answer cannot be located; set train_on = "last answer" in the corpus stage, or use a '
                    "template with {% generation %} blocks"
                )
            start = self._start(messages, n, after)
            ends = list(self._special.finditer(after, start))
            stop = ends[-1].end() if ends and not after[ends[-1].end() :].strip() else len(after)
            spans.append((start, stop))
        for start, stop in reversed(spans):
            text = text[:start] + OPEN + text[start:stop] + CLOSE + text[stop:]
        return text

    def _start(self, messages: Sequence[Mapping[str, Any]], n: int, after: str) -> int:
        """Where answer `n` begins in `after`, the text that ends with it."""
        try:
            prompt = self._run(messages[:n], True)
        except ConversationRefused:
            if n > 0:
                raise
            raise ConversationRefused(
                "chat template: the conversation begins with an answer, and the template cannot render what comes "
                "before it; begin with a user's message, or set train = false on the answer"
            ) from None
        if after.startswith(prompt):
            return len(prompt)
        history, marked = self._run(messages[:n], False), {**messages[n], "content": _MARK}
        common = _common_prefix(prompt, self._run([*messages[:n], marked], False))
        start = next((m.start() for m in self._special.finditer(prompt) if m.start() < len(common) < m.end()), None)
        start = len(re.sub(r"[<\[◁]\|?$", "", common)) if start is None else start  # not within the name of a tag
        if not (common.startswith(history) and after.startswith(common) and opens_thought(prompt[start:])):
            raise ConversationRefused(
                f"chat template: the text up to message {n + 1} is not a prefix of the text with it, so the answer "
                "cannot be located; set train = false on that message, or use a template with {% generation %} blocks"
            )
        if _reasoning(messages[n]):
            raise ConversationRefused(
                f"chat template: the generation prompt ends in {prompt[start:]!r}, which the reasoning of message "
                f"{n + 1} does not continue; set enable_thinking = true in the tokenizer stage, or use another template"
            )
        return start

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


def opens_thought(text: str) -> bool:
    """Whether the end of a generation prompt opens (or opens and closes) a thought."""
    return bool(_THOUGHT.search(text))


def lost_reasoning(number: int) -> ConversationRefused:
    """The error for an answer whose reasoning the chat format does not show."""
    return ConversationRefused(
        f"chat template: the text does not contain the reasoning of message {number}, which would be lost; set "
        'reasoning = "drop" in the corpus stage to train without it, or use a template that shows it'
    )


def _reasoning(message: Mapping[str, str]) -> str:
    """The reasoning of a message, in its own field or between `<think>` and `</think>` in the content, or ""."""
    reasoning = message.get("reasoning_content")
    if reasoning is None and "</think>" in message["content"]:
        reasoning = message["content"].split("</think>")[0].split("<think>")[-1]
    return (reasoning or "").strip()


def _common_prefix(a: str, b: str) -> str:
    different = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(different, min(len(a), len(b)))]


def _variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that templates read. Llama's read the date as text, others format it with `strftime_now`."""
    given = dict(variables)
    if (date := given.pop("date", None)) is not None:
        midnight = datetime.datetime.fromisoformat(date)
        given |= {"date_string": midnight.strftime("%d %b %Y"), "strftime_now": midnight.strftime}
    return given


def with_defaults(source: str, variables: Mapping[str, Any]) -> str:
    """The template with `Tokenizer.template_variables` as defaults, for programs that do not know their values."""
    given = _variables(variables)
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif +%}}"
        for name, value in given.items()
        if not callable(value)
    ]
    if strftime := given.get("strftime_now"):
        formats = {match[2]: strftime(match[2]) for match in _STRFTIME.finditer(source)}
        lines.append(f"{{%- macro strftime_now(format) %}}{{{{ {json.dumps(formats)}[format] }}}}{{%- endmacro +%}}")
    return "".join(lines) + source


@functools.lru_cache(maxsize=16)
def _cached_template(
    source: str,
    special_tokens_map: tuple[Any, ...],
    placeholders: tuple[Any, ...],
    ends: frozenset[str],
    variables: tuple[Any, ...],
) -> Template:
    return Template(source, dict(special_tokens_map), dict(placeholders), ends, dict(variables))


def compile_template(
    source: str,
    special_tokens_map: Mapping[str, str],
    placeholders: Mapping[str, str],
    ends: frozenset[str],
    variables: Mapping[str, Any],
) -> Template:
    """A cached `Template` of the same arguments."""
    names, hidden, given = (tuple(sorted(m.items())) for m in (special_tokens_map, placeholders, variables))
    return _cached_template(source, names, hidden, ends, given)
