"""Converts rows of common data sets to documents of the stage's format.

Each row is recognised by its field names. A field has a role; the names of each role are those below, or the one in the
setting `fields`. A row with two non-empty fields of one role is rejected as ambiguous.

    messages      messages, conversations (a list; or the row itself is one)
    prompt        prompt, question, instruction (with `input`, or Dolly's `context`, below it); before it the pairs of a
                  `history`
    completion    completion, response, answer, output
    system        system, system_prompt
    chosen, rejected

A message is `{role, content}` or ShareGPT's `{from, value}`; content may be a list of text parts. OpenAI's `weight` of
a message becomes `train`. Documents are JSON: a list of messages (`chat`, `prompts`), or `{prompt, chosen, rejected}`
with three lists (`pairs`).

Transcripts are not split at "Human:" and "Assistant:", because a message can contain these words. Instruction and input
are joined without a template, because its wording is the user's choice.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ingot.corpus.readers.files import BadRow
from ingot.corpus.readers.json_files import parse

Format = Literal["text", "chat", "pairs", "prompts"]
Role = Literal["messages", "system", "prompt", "completion", "chosen", "rejected"]
Messages = list[dict[str, Any]]

NAMES: dict[Role, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "question", "instruction"),
    "completion": ("completion", "response", "answer", "output"),
    "system": ("system", "system_prompt"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
"""Role -> known field names."""
ROLES: dict[Format, tuple[Role, ...]] = {
    "text": (),
    "chat": ("messages", "system", "prompt", "completion"),
    "pairs": ("prompt", "system", "chosen", "rejected"),
    "prompts": ("prompt", "messages", "system"),
}
"""Format -> roles that its rows can have."""
MESSAGE_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
"""Role of a message in the data -> role in a document."""
_EXPECTED_FIELDS: dict[Format, str] = {
    "chat": "messages, conversations, or a prompt (question, instruction) with a completion (response, answer, output)",
    "pairs": "chosen and rejected, with a prompt (question, instruction) unless they are lists of messages",
    "prompts": "a prompt (question, instruction), or messages (conversations) that end with a user's",
}


class Document(NamedTuple):
    """A document of the stage's format."""

    text: str
    extra: str | None = None
    """The row's other fields as a JSON object, for formats that store them."""


def is_trained_on(message: Mapping[str, Any]) -> bool:
    """Whether the message contributes to the loss: an assistant's, unless it has `train` = false."""
    return message["role"] == "assistant" and message.get("train", True)


def exclude_from_loss(messages: Messages) -> Messages:
    """The messages with `train` = false for those of the assistant: a prompt for another answer."""
    return [{**m, "train": False} if m.get("role") == "assistant" else m for m in messages]


def dump_document(document: Any) -> str:
    """The canonical JSON of a document that is not plain text, for the `text` column."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def row_parser(format: Format, field: str | None, fields: Mapping[Role, str]) -> Callable[[Any], Document]:
    """A function that converts a row to a document.

    Args:
        format: the stage's format.
        field: the text field, for format `text`.
        fields: role -> field name, which replaces the known names of the role.

    Returns:
        A function that raises BadRow for a row that does not fit the format.
    """
    if format == "text":
        assert field is not None
        return lambda row: Document(_text(row, field))
    parse_row = _PARSERS[format]
    return lambda row: parse_row(_Row(row, format, fields))


def identifying_fields(format: Format, field: str | None, fields: Mapping[Role, str]) -> frozenset[str]:
    """Field names of which every row of the format has at least one."""
    if format == "text":
        assert field is not None
        return frozenset({field})
    roles: tuple[Role, ...] = ("chosen",) if format == "pairs" else ("messages", "prompt")
    return frozenset(name for role in roles for name in (fields.get(role), *NAMES[role]) if name)


def missing_field(field: str, names: list[str]) -> str:
    """The reason to reject a row or table that has the fields `names` but not the text field."""
    other = ', or format = "chat" for conversations' if {*NAMES["messages"]} & {*names} else ""
    return f"no field '{field}', found {_quoted(names)}; set `field` to the one that holds the document{other}"


def json_type(value: Any) -> str:
    """The name of the value's JSON type."""
    types = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return types.get(type(value), "null" if value is None else type(value).__name__)


def _text(row: Any, field: str) -> str:
    if not isinstance(row, dict):
        raise BadRow(f"found a JSON {json_type(row)}, expected an object with a field for the document")
    if field not in row:
        raise BadRow(missing_field(field, list(row)))
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"field '{field}' is a JSON {json_type(value)}, expected a string")
    return value


class _Row:
    """Access to the fields of a row by role; records which fields were used."""

    def __init__(self, row: Any, format: Format, fields: Mapping[Role, str]):
        if isinstance(row, list):  # a bare conversation
            row = {"messages": row}
        if not isinstance(row, dict):
            raise BadRow(f"found a JSON {json_type(row)}, expected an object, or a list of messages")
        self._row: dict[str, Any] = row
        self._format: Format = format
        self._fields, self._used = fields, set[str]()

    def find(self, role: Role) -> tuple[str, Any] | None:
        """(name, value) of the field with the role, or None. Empty values count only if there is no other."""
        known = (self._fields[role],) if role in self._fields else NAMES[role]
        names = [name for name in known if self._row.get(name) is not None]
        if len(names) > 1:
            names = [name for name in names if self._row[name] not in ("", [])] or names[:1]
        if len(names) > 1:
            raise BadRow(f"both {' and '.join(map(repr, names))} may be the {role}; choose with fields.{role}")
        self._used.update(names)
        return (names[0], self._row[names[0]]) if names else None

    def messages(self, role: Role, speaker: str) -> Messages | None:
        """The messages in the field with the role, or None. A string is one message of the speaker."""
        field = self.find(role)
        if field is None:
            return None
        name, value = field
        if isinstance(value, str) and value.lstrip().startswith("["):  # tables store a list as a JSON string
            value = _parse_list(value, name, or_text=role != "messages")
        if isinstance(value, str) and role != "messages":
            if name == "instruction":
                value = self._with_input(value)
            return [{"role": speaker, "content": value}]
        if isinstance(value, dict) and role in ("chosen", "rejected"):
            value = [value]
        if not isinstance(value, list) or not value:
            text = "a string or " if role != "messages" else ""
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected {text}a non-empty list of messages")
        messages = [_message(message, number, name) for number, message in enumerate(value, 1)]
        return [m for m in messages if m["role"] != "system" or m["content"].strip()] or messages

    def with_system(self, messages: Messages) -> Messages:
        """The messages, preceded by the row's system prompt if it has one."""
        field = self.find("system")
        if field is None or field[1] == "":
            return messages
        name, value = field
        if not isinstance(value, str):
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected a string")
        if messages[0]["role"] == "system":
            raise BadRow(f"field '{name}' is a system prompt, but the messages begin with one; keep one of them")
        return [{"role": "system", "content": value}, *messages]

    def prompt(self) -> Messages | None:
        """The messages of the prompt, or None: system prompt, history, then the prompt itself."""
        messages = self.messages("prompt", "user")
        if messages is None:
            return None
        start = 1 if messages[0]["role"] == "system" else 0
        return self.with_system([*messages[:start], *self._history(), *messages[start:]])

    def has_custom_name(self, *roles: Role) -> bool:
        """Whether the setting `fields` names one of the roles."""
        return any(role in self._fields for role in roles)

    def extra(self) -> str | None:
        """The unused fields as JSON, sorted by name; None if there are none."""
        rest = {k: v for k, v in self._row.items() if k not in self._used and v is not None}
        try:
            return json.dumps(rest, ensure_ascii=False, sort_keys=True, default=str) if rest else None
        except RecursionError:
            raise BadRow("found a field that is nested too deeply") from None

    def unknown(self) -> BadRow:
        """The error for a row without the fields of the format."""
        custom = "".join(f", fields.{role} = '{name}'" for role, name in self._fields.items())
        return BadRow(
            f"not a row of {self._format}: expected {_EXPECTED_FIELDS[self._format]}; found "
            f"{_quoted(list(self._row))}{custom}; name others with fields = {{ {ROLES[self._format][0]} = ... }}"
        )

    def _with_input(self, instruction: str) -> str:
        inputs = {n: v for n in ("input", "context") if n not in self._fields.values() and (v := self._row.get(n))}
        if not isinstance(inputs.get("input", ""), str):
            raise BadRow(f"field 'input' is a JSON {json_type(inputs['input'])}, expected a string")
        names = [name for name, value in inputs.items() if isinstance(value, str)]  # another `context` is an extra
        if len(names) > 1:
            raise BadRow("both 'input' and 'context' may belong to the instruction; remove one of them")
        self._used.update(names)
        return "\n\n".join([instruction, *(inputs[name] for name in names)])

    def _history(self) -> Messages:
        """The earlier turns in LLaMA-Factory's field `history`."""
        turns = self._row.get("history")
        if isinstance(turns, str) and turns.startswith("["):  # tables store a list as a JSON string
            turns = _parse_list(turns, "history", or_text=False)
        if not isinstance(turns, list) or not turns:
            return []
        if not all(isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in turns):
            raise BadRow("field 'history' is a JSON array, expected pairs of strings: a question and its answer")
        self._used.add("history")
        speakers = ("user", "assistant")
        return [{"role": s, "content": c} for turn in turns for s, c in zip(speakers, turn, strict=True)]


def _chat(row: _Row) -> Document:
    """A conversation. Of a prompt and its completion only the completion contributes to the loss."""
    if not row.has_custom_name("prompt", "completion"):
        messages = row.messages("messages", "user")
        if messages is not None:
            return Document(dump_document(row.with_system(messages)))
    prompt, completion = row.prompt(), row.messages("completion", "assistant")
    if prompt is None or completion is None:
        raise row.unknown()
    _check_completion(completion, "completion")
    return Document(dump_document([*exclude_from_loss(prompt), *completion]))


def _pair(row: _Row) -> Document:
    chosen, rejected = row.messages("chosen", "assistant"), row.messages("rejected", "assistant")
    if chosen is None or rejected is None:
        raise row.unknown()
    prompt, answers = row.prompt(), (_without_train(chosen), _without_train(rejected))
    has_prompt = [messages[0]["role"] != "assistant" for messages in answers]
    if any(has_prompt) and not all(has_prompt):
        raise BadRow("one of chosen and rejected begins with the prompt, the other with the answer")
    if all(has_prompt):
        shared, answers = _split_prompt(*answers)
        shared = row.with_system(shared)
        if prompt is not None and any(message not in shared for message in _without_train(prompt)):
            raise BadRow("the prompt of chosen and rejected differs from the prompt of the row; remove one of the two")
        prompt = shared
    if prompt is None:
        raise BadRow(
            "chosen and rejected without a prompt, expected one, or lists of messages that begin with it "
            "(transcripts with 'Human:' and 'Assistant:' are not split)"
        )
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        _check_completion(answer, name)
    pair = {"prompt": _without_train(prompt), "chosen": answers[0], "rejected": answers[1]}
    return Document(dump_document(pair), row.extra())


def _split_prompt(chosen: Messages, rejected: Messages) -> tuple[Messages, tuple[Messages, Messages]]:
    """The common first messages of two conversations, and the rest of each (at least one message)."""
    max_length = min(len(chosen), len(rejected)) - 1
    length = next((n for n in range(max_length) if chosen[n] != rejected[n]), max_length)
    if length == 0:
        raise BadRow("chosen and rejected are conversations without a common first message, expected a common prompt")
    return chosen[:length], (chosen[length:], rejected[length:])


def _prompts(row: _Row) -> Document:
    messages = row.prompt()
    if messages is None:
        messages = row.messages("messages", "user")
        if messages is None:
            raise row.unknown()
        messages = row.with_system(messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"the last message is the {messages[-1]['role']}'s, expected a user's for the model to answer")
    return Document(dump_document(_without_train(messages)), row.extra())


_PARSERS: dict[str, Callable[[_Row], Document]] = {"chat": _chat, "pairs": _pair, "prompts": _prompts}


def _parse_list(value: str, name: str, or_text: bool) -> Any:
    """The list of messages in a JSON string. With `or_text`, any other string is returned unchanged."""
    parsed = parse(value.encode(), 1)
    if not or_text:
        if isinstance(parsed, BadRow):
            raise BadRow(f"field '{name}': {parsed}")
        return parsed
    objects = isinstance(parsed, list) and bool(parsed) and all(isinstance(one, dict) for one in parsed)
    messages = objects and all({"role", "content"} <= {*m} or {"from", "value"} <= {*m} for m in parsed)
    return parsed if messages else value


def _message(message: Any, number: int, field: str) -> dict[str, Any]:
    where = f"message {number} of '{field}'"
    if not isinstance(message, dict):
        raise BadRow(f"{where} is a JSON {json_type(message)}, expected {{role, content}}")
    role_key, text_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    if call := next((name for name in ("tool_calls", "function_call") if message.get(name)), None):
        raise BadRow(f"{where} calls a tool ('{call}'), expected text; write the call as text, or remove it")
    content = _join_parts(message.get(text_key), where)
    if not isinstance(content, str):
        raise BadRow(f'{where} has no string "{text_key}", expected {{{role_key}, {text_key}}}')
    name = message.get(role_key)
    role = MESSAGE_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"{where} has {role_key} {name!r}, expected one of {', '.join(MESSAGE_ROLES)}")
    parsed: dict[str, Any] = {"role": role, "content": content}
    weight = message.get("weight") if role == "assistant" else None
    for name, value, expected in (("weight", weight, "0 or 1"), ("train", message.get("train"), "true or false")):
        if value is not None:
            if value not in (0, 1) or isinstance(value, bool) != (name == "train"):
                raise BadRow(f"{where} has {name} = {value!r}, expected {expected}")
            parsed["train"] = bool(value)
    return parsed


def _join_parts(content: Any, where: str) -> Any:
    """The text of a message whose content is a list of parts, as in multimodal data sets."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else json_type(part)
            raise BadRow(f"{where} has a part of type {kind!r}, expected only 'text' parts")
    return "".join(part["text"] for part in content)


def _without_train(messages: Messages) -> Messages:
    """The messages without `train`, which the formats pairs and prompts do not use."""
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _check_completion(messages: Messages, name: str) -> None:
    for end, message in (("begins", messages[0]), ("ends", messages[-1])):
        if message["role"] != "assistant":
            raise BadRow(f"the {name} {end} with a {message['role']} message, expected an assistant's")


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
