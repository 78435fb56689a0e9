"""From a row, as people have it, to the document of the stage's format; or why it is none.

A row is recognised by its fields, each row for itself. What a field is for is its role; a role has a few names that
data sets use, and `fields` gives it another. Where two names of one role are filled, the row is refused rather than
read by chance.

    messages      messages, conversations (a list; or the row itself is one)
    prompt        prompt, question, instruction (with `input`, or Dolly's `context`, below it); before it the pairs of a
                  `history`
    completion    completion, response, answer, output
    system        system, system_prompt
    chosen, rejected

A message is `{role, content}` or ShareGPT's `{from, value}`; content may be a list of parts that are texts. OpenAI's
`weight` of a message is our `train`. Documents are JSON: a list of messages (`chat`,
`prompts`), or `{prompt, chosen, rejected}` of three lists (`pairs`).

Rejected: taking transcripts apart at "Human:" and "Assistant:" (a message may hold those words, and where it does the
pair is silently wrong), and one template around instruction and input (the words of a template are the user's choice).
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
ROLES: dict[Format, tuple[Role, ...]] = {
    "text": (),
    "chat": ("messages", "system", "prompt", "completion"),
    "pairs": ("prompt", "system", "chosen", "rejected"),
    "prompts": ("prompt", "messages", "system"),
}
"""What a row of each format may hold."""
SPEAKERS = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
_KNOWN: dict[Format, str] = {
    "chat": "messages, conversations, or a prompt (question, instruction) with a completion (response, answer, output)",
    "pairs": "chosen and rejected, with a prompt (question, instruction) unless they are lists of messages",
    "prompts": "a prompt (question, instruction), or messages (conversations) that end with a user's",
}


class Document(NamedTuple):
    """What a row became."""

    text: str
    extra: str | None = None
    """The row's other fields as a JSON object, for formats that keep them."""


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message of a conversation is trained on: an assistant's, unless it says otherwise."""
    return message["role"] == "assistant" and message.get("train", True)


def unlearned(messages: Messages) -> Messages:
    """The same messages, of which none is trained on, an assistant's own neither: what another answer follows."""
    return [{**m, "train": False} if m.get("role") == "assistant" else m for m in messages]


def dump_document(document: Any) -> str:
    """The one spelling, in the `text` column, of a document that is no text."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def shape(format: Format, field: str | None, fields: Mapping[Role, str]) -> Callable[[Any], Document]:
    """The function from rows to documents.

    Args:
        format: of the stage.
        field: of `text`: the field that holds it.
        fields: names of the data for roles that are not called by one of theirs.

    Returns:
        A function that raises BadRow for a row that has none of the format's shapes.
    """
    if format == "text":
        assert field is not None
        return lambda row: Document(_text(row, field))
    make = _MAKE[format]
    return lambda row: make(_Row(row, format, fields))


def names(format: Format, field: str | None, fields: Mapping[Role, str]) -> frozenset[str]:
    """Fields of which a row of the format has at least one."""
    if format == "text":
        assert field is not None
        return frozenset({field})
    roles: tuple[Role, ...] = ("chosen",) if format == "pairs" else ("messages", "prompt")
    return frozenset(name for role in roles for name in (fields.get(role), *NAMES[role]) if name)


def missing(field: str, found: list[str]) -> str:
    """The reason for a row or a table without the field of a text."""
    other = ', or format = "chat" for conversations' if {*NAMES["messages"]} & {*found} else ""
    return f"no field '{field}', found {_quoted(found)}; set `field` to the one that holds the document{other}"


def json_type(value: Any) -> str:
    """What JSON calls it."""
    known = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return known.get(type(value), "null" if value is None else type(value).__name__)


def _text(row: Any, field: str) -> str:
    if not isinstance(row, dict):
        raise BadRow(f"found a JSON {json_type(row)}, expected an object with a field for the document")
    if field not in row:
        raise BadRow(missing(field, list(row)))
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"field '{field}' is a JSON {json_type(value)}, expected a string")
    return value


class _Row:
    """A row that is asked for roles, and knows what nobody asked for."""

    def __init__(self, row: Any, format: Format, fields: Mapping[Role, str]):
        if isinstance(row, list):  # a bare conversation
            row = {"messages": row}
        if not isinstance(row, dict):
            raise BadRow(f"found a JSON {json_type(row)}, expected an object, or a list of messages")
        self._row: dict[str, Any] = row
        self._format: Format = format
        self._fields, self._used = fields, set[str]()

    def find(self, role: Role) -> tuple[str, Any] | None:
        """The name and the value of what plays a role; empty text and lists count where nothing else does."""
        known = (self._fields[role],) if role in self._fields else NAMES[role]
        found = [name for name in known if self._row.get(name) is not None]
        if len(found) > 1:
            found = [name for name in found if self._row[name] not in ("", [])] or found[:1]
        if len(found) > 1:
            raise BadRow(f"both {' and '.join(map(repr, found))} may be the {role}; choose with fields.{role}")
        self._used.update(found)
        return (found[0], self._row[found[0]]) if found else None

    def messages(self, role: Role, speaker: str) -> Messages | None:
        """The messages of a role; a text is one message of the speaker."""
        asked = self.find(role)
        if asked is None:
            return None
        name, value = asked
        if isinstance(value, str) and value.lstrip().startswith("["):  # as a table holds it
            value = _listed(value, name, text=role != "messages")
        if isinstance(value, str) and role != "messages":
            if name == "instruction":
                value = self._with_input(value)
            return [{"role": speaker, "content": value}]
        if isinstance(value, dict) and role in ("chosen", "rejected"):
            value = [value]
        if not isinstance(value, list) or not value:
            text = "a text or " if role != "messages" else ""
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected {text}a list of messages, not empty")
        found = [_message(message, number, name) for number, message in enumerate(value, 1)]
        return [m for m in found if m["role"] != "system" or m["content"].strip()] or found

    def after_system(self, messages: Messages) -> Messages:
        """The messages below the row's system text, where it has one."""
        found = self.find("system")
        if found is None or found[1] == "":
            return messages
        name, value = found
        if not isinstance(value, str):
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected a string")
        if messages[0]["role"] == "system":
            raise BadRow(f"field '{name}' holds a system text, but the messages begin with one; keep one of them")
        return [{"role": "system", "content": value}, *messages]

    def prompt(self) -> Messages | None:
        """What a model is to answer, or None. Its own answers in it are context, not examples."""
        messages = self.messages("prompt", "user")
        if messages is None:
            return None
        after = 1 if messages[0]["role"] == "system" else 0
        return self.after_system([*messages[:after], *self._history(), *messages[after:]])

    def names_given(self, *roles: Role) -> bool:
        """Whether the user gave a name to one of the roles."""
        return any(role in self._fields for role in roles)

    def extra(self) -> str | None:
        """What nobody asked for, as JSON in the order of names."""
        rest = {k: v for k, v in self._row.items() if k not in self._used and v is not None}
        try:
            return json.dumps(rest, ensure_ascii=False, sort_keys=True, default=str) if rest else None
        except RecursionError:
            raise BadRow("found a field that is nested hundreds of levels deep") from None

    def unknown(self) -> BadRow:
        """The reason for a row of another shape."""
        given = "".join(f", fields.{role} = '{name}'" for role, name in self._fields.items())
        return BadRow(
            f"not a row of {self._format}: expected {_KNOWN[self._format]}; found {_quoted(list(self._row))}{given}; "
            f"name others with fields = {{ {ROLES[self._format][0]} = ... }}"
        )

    def _with_input(self, instruction: str) -> str:
        known = {n: v for n in ("input", "context") if n not in self._fields.values() and (v := self._row.get(n))}
        if not isinstance(known.get("input", ""), str):
            raise BadRow(f"field 'input' is a JSON {json_type(known['input'])}, expected a string")
        given = [name for name, value in known.items() if isinstance(value, str)]  # a `context` may be something else
        if len(given) > 1:
            raise BadRow("both 'input' and 'context' may stand below the instruction; remove one of them")
        self._used.update(given)
        return "\n\n".join([instruction, *(known[name] for name in given)])

    def _history(self) -> Messages:
        """Questions and answers from before the prompt, as LLaMA-Factory's rows hold them."""
        turns = self._row.get("history")
        if isinstance(turns, str) and turns.startswith("["):  # as a table holds it
            turns = _listed(turns, "history", text=False)
        if not isinstance(turns, list) or not turns:
            return []
        if not all(isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in turns):
            raise BadRow("field 'history' is a JSON array, expected pairs of texts, a question and its answer")
        self._used.add("history")
        speakers = ("user", "assistant")
        return [{"role": s, "content": c} for turn in turns for s, c in zip(speakers, turn, strict=True)]


def _chat(row: _Row) -> Document:
    """A conversation; of a prompt and its completion, the completion alone is learned."""
    if not row.names_given("prompt", "completion"):
        messages = row.messages("messages", "user")
        if messages is not None:
            return Document(dump_document(row.after_system(messages)))
    prompt, completion = row.prompt(), row.messages("completion", "assistant")
    if prompt is None or completion is None:
        raise row.unknown()
    _check_completion(completion, "completion")
    return Document(dump_document([*unlearned(prompt), *completion]))


def _pair(row: _Row) -> Document:
    chosen, rejected = row.messages("chosen", "assistant"), row.messages("rejected", "assistant")
    if chosen is None or rejected is None:
        raise row.unknown()
    prompt, sides = row.prompt(), (_plain(chosen), _plain(rejected))
    whole = [side[0]["role"] != "assistant" for side in sides]  # a whole conversation, its prompt included
    if any(whole) and not all(whole):
        raise BadRow("one of chosen and rejected begins with the prompt, the other with the answer")
    if all(whole):
        shared, sides = _shared(*sides)
        shared = row.after_system(shared)
        if prompt is not None and any(message not in shared for message in _plain(prompt)):
            raise BadRow("chosen and rejected share another prompt than the row gives; remove one of the two")
        prompt = shared
    if prompt is None:
        raise BadRow(
            "chosen and rejected without a prompt, expected one, or lists of messages that begin with it "
            "(texts of 'Human:' and 'Assistant:' are not taken apart)"
        )
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        _check_completion(side, name)
    return Document(dump_document({"prompt": _plain(prompt), "chosen": sides[0], "rejected": sides[1]}), row.extra())


def _shared(chosen: Messages, rejected: Messages) -> tuple[Messages, tuple[Messages, Messages]]:
    """The prompt that two conversations begin with, and what each goes on with."""
    most = min(len(chosen), len(rejected)) - 1
    length = next((n for n in range(most) if chosen[n] != rejected[n]), most)
    if length == 0:
        raise BadRow("chosen and rejected are conversations that share no message, so there is no prompt")
    return chosen[:length], (chosen[length:], rejected[length:])


def _prompts(row: _Row) -> Document:
    messages = row.prompt()
    if messages is None:
        messages = row.messages("messages", "user")
        if messages is None:
            raise row.unknown()
        messages = row.after_system(messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"the last message is the {messages[-1]['role']}'s, expected a user's for the model to answer")
    return Document(dump_document(_plain(messages)), row.extra())


_MAKE: dict[str, Callable[[_Row], Document]] = {"chat": _chat, "pairs": _pair, "prompts": _prompts}


def _listed(value: str, name: str, text: bool) -> Any:
    """The list of messages that a string spells in JSON; where it may be a text, itself if it spells anything else."""
    parsed = parse(value.encode(), 1)
    if not text:
        if isinstance(parsed, BadRow):
            raise BadRow(f"'{name}' is {parsed}")
        return parsed
    tables = isinstance(parsed, list) and bool(parsed) and all(isinstance(one, dict) for one in parsed)
    return parsed if tables and all({"role", "content"} <= {*m} or {"from", "value"} <= {*m} for m in parsed) else value


def _message(message: Any, number: int, field: str) -> dict[str, Any]:
    where = f"message {number} of '{field}'"
    if not isinstance(message, dict):
        raise BadRow(f"{where} is a JSON {json_type(message)}, expected {{role, content}}")
    speaker, said = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    if called := next((name for name in ("tool_calls", "function_call") if message.get(name)), None):
        raise BadRow(
            f"{where} calls a tool ('{called}'), expected text alone; write the call out as text, or leave it out"
        )
    content = _joined(message.get(said), where)
    if not isinstance(content, str):
        raise BadRow(f'{where} has no string "{said}", expected {{{speaker}, {said}}}')
    name = message.get(speaker)
    role = SPEAKERS.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"{where} has {speaker} {name!r}, expected one of {', '.join(SPEAKERS)}")
    kept: dict[str, Any] = {"role": role, "content": content}
    weight = message.get("weight") if role == "assistant" else None
    for name, value, known in (("weight", weight, "0 or 1"), ("train", message.get("train"), "true or false")):
        if value is not None:
            if value not in (0, 1) or isinstance(value, bool) != (name == "train"):
                raise BadRow(f"{where} has {name} = {value!r}, expected {known}")
            kept["train"] = bool(value)
    return kept


def _joined(content: Any, where: str) -> Any:
    """The text of a message that is a list of parts, as multimodal data sets write it."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else json_type(part)
            raise BadRow(f"{where} has a part that is {kind!r}, expected parts of type 'text' alone")
    return "".join(part["text"] for part in content)


def _plain(messages: Messages) -> Messages:
    """Without `train`: in pairs and prompts the format says what is learned."""
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _check_completion(messages: Messages, name: str) -> None:
    for end, message in (("begins", messages[0]), ("ends", messages[-1])):
        if message["role"] != "assistant":
            raise BadRow(f"the {name} {end} with a {message['role']} message, expected an assistant's")


def _quoted(found: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in found) or "none"
